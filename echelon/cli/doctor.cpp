// `echelon doctor`: a check for each thing that training needs of a machine. A
// check never throws, and a finding that is not ok has a remedy. What can be
// tried is tried: a memfd, a pidfd, a port, and an all-reduce of two ranks in
// processes of their own with a time limit. All checks run whatever the earlier
// ones found, and errors alone, not warnings, make the exit code 1.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "echelon/cli/command_line.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cluster/local_machine.h"
#include "echelon/cluster/quantity.h"
#include "echelon/error.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;

enum class Level { ok, warning, error };

struct Finding {
  Level level = Level::ok;
  std::string text;
  std::string remedy = {};  // empty when ok
};

Finding fine(std::string text) {
  return {Level::ok, std::move(text)};
}

Finding warning(std::string text, std::string remedy) {
  return {Level::warning, std::move(text), std::move(remedy)};
}

Finding warning_if(bool bad, std::string text, std::string remedy) {
  return bad ? warning(std::move(text), std::move(remedy))
             : fine(std::move(text));
}

Finding failure(std::string text, std::string remedy) {
  return {Level::error, std::move(text), std::move(remedy)};
}

// --- The programs -----------------------------------------------------------

/// From lines of the loader: `libtorch_cpu.so => /lib/libtorch_cpu.so (0x7f…)`.
struct Libraries {
  std::string torch;                 // path of libtorch_cpu.so
  std::vector<std::string> missing;  // names
};

Libraries libraries_of(const std::string& program) {
  // With this variable the loader lists the libraries and starts nothing. A
  // program that lacks a library could not report it itself.
  const auto listed = capture(
      {program}, std::chrono::seconds(20), {{"LD_TRACE_LOADED_OBJECTS", "1"}});
  Libraries libraries;
  for (const auto& line : split(listed.out)) {
    std::istringstream words(line);
    std::string name, arrow, path;
    words >> name >> arrow >> path;
    if (arrow != "=>") continue;
    if (path == "not") libraries.missing.push_back(name);
    if (name == "libtorch_cpu.so") libraries.torch = path;
  }
  return libraries;
}

/// The wheel has its version in torch/version.py, LibTorch's archive in
/// build-version.
std::string torch_version(const fs::path& library) {
  const fs::path root = library.parent_path().parent_path();
  std::ifstream wheel(root / "version.py");
  for (std::string line; std::getline(wheel, line);) {
    if (!line.starts_with("__version__")) continue;
    const size_t begin = line.find('\'');
    const size_t end = line.rfind('\'');
    if (begin < end) return line.substr(begin + 1, end - begin - 1);
  }
  std::ifstream archive(root / "build-version");
  std::string line;
  std::getline(archive, line);
  return line.empty() ? "of unknown version" : line;
}

std::string last_line(const std::string& text) {
  std::string last;
  for (const auto& line : split(text)) {
    if (!line.empty()) last = line;
  }
  return last;
}

/// The microseconds of the first all_reduce among the rows of `text`, which is
/// what `echelon bench collectives --json` prints. Negative when there is none.
double all_reduce_microseconds(const std::string& text) {
  const auto rows = nlohmann::json::parse(text, nullptr, false);
  if (!rows.is_array()) return -1;
  for (const auto& row : rows) {
    if (row.is_object() && row.value("operation", "") == "all_reduce") {
      return row.value("microseconds", -1.0);
    }
  }
  return -1;
}

Finding find_compiler() {
  return fine(format("{}, {}", build_info::kCompiler, build_info::kBuildType));
}

Finding find_libtorch() {
  std::string program;
  try {
    program = find_echelon_train();
  } catch (const Error& error) {
    return failure(
        "echelon-train is not in the folder of this program",
        "build with LibTorch (ECHELON_LIBTORCH, or make build) and install "
        "both programs");
  }
  const auto libraries = libraries_of(program);
  if (!libraries.missing.empty()) {
    return failure(
        "echelon-train does not start: " + libraries.missing.front() +
            " is not found",
        "build again if LibTorch was moved, or name its lib folder in "
        "LD_LIBRARY_PATH");
  }
  if (libraries.torch.empty()) {
    return failure(
        "echelon-train does not load libtorch_cpu.so",
        "build again with ECHELON_LIBTORCH set");
  }
  const std::string version = torch_version(libraries.torch);
  const std::string text =
      version + ", " + fs::path(libraries.torch).parent_path().string();
  if (!version.starts_with(format("{}.", build_info::kLibTorch))) {
    return failure(
        text,
        format(
            "echelon was built with {}; set ECHELON_LIBTORCH to such a copy "
            "and build again",
            build_info::kLibTorch));
  }
  return fine(text);
}

/// Two ranks sum 1 MiB; takes at most a minute.
Finding find_all_reduce() {
  std::error_code error;
  const auto self = fs::read_symlink("/proc/self/exe", error);
  try {
    find_echelon_train();
  } catch (const Error&) {
    return failure(
        "not tried: there is no echelon-train", "see LibTorch above");
  }
  const auto result = capture(
      {self.string(), "bench", "collectives", "--backend", "local", "-n", "2",
       "--bytes", "1048576", "--json"},
      std::chrono::seconds(60));
  if (result.timed_out) {
    return failure(
        "two ranks do not finish within 60 s",
        "try it by hand: echelon bench collectives -n 2 --backend gloo");
  }
  const double microseconds = all_reduce_microseconds(result.out);
  if (result.exit_code != 0 || microseconds < 0) {
    const std::string said = last_line(result.err);
    return failure(
        format(
            "two ranks fail with exit code {}{}", result.exit_code,
            said.empty() ? "" : ": " + said),
        "try it by hand: echelon bench collectives -n 2");
  }
  return fine(format("two ranks sum 1 MiB in {:.0f} us (local)", microseconds));
}

// --- The host ---------------------------------------------------------------

rlimit limit_of(decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  return limit;
}

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

/// "8 x NVIDIA H100 80GB HBM3 with 80 GiB, driver 560.35.03 (CUDA 12.6)", with
/// a part for each kind of GPU.
std::string gpus_text(const cluster::NvmlFindings& nvml) {
  std::vector<std::pair<std::string, int>> kinds;
  for (const auto& gpu : nvml.gpus) {
    const std::string kind =
        gpu.name + " with " + format_bytes(gpu.memory_bytes);
    if (kinds.empty() || kinds.back().first != kind) kinds.push_back({kind, 0});
    ++kinds.back().second;
  }
  std::string text;
  for (const auto& [kind, count] : kinds) {
    text += format("{}{} x {}", text.empty() ? "" : ", ", count, kind);
  }
  text += ", driver " + nvml.driver;
  if (nvml.cuda > 0) {
    text += format(" (CUDA {}.{})", nvml.cuda / 1000, nvml.cuda % 1000 / 10);
  }
  return text;
}

Finding find_processor() {
  const int cores = cluster::available_cores();
  const long all = std::max<long>(
      std::thread::hardware_concurrency(), ::sysconf(_SC_NPROCESSORS_ONLN));
  std::string text = counted(cores, "core");
  if (cores < all) text += format(" of {}, by affinity or cgroup", all);
  return warning_if(
      cores < 2, text,
      "ranks on one core take turns; give this machine or container more");
}

Finding find_memory() {
  const cluster::HostMemory memory = cluster::host_memory();
  const double available = memory.free_bytes;
  const double limit = memory.limit_bytes;
  std::string text = format(
      "{} free of {}", format_bytes(available),
      format_bytes(memory.total_bytes));
  if (limit > 0 && limit < memory.total_bytes) {
    text += ", this cgroup may use " + format_bytes(limit);
  }
  const double usable = limit > 0 ? std::min(limit, available) : available;
  // A rank with LibTorch loaded takes about 250 MiB before its model.
  return warning_if(
      usable < kGiB, text,
      "a rank needs about 250 MiB before its model; free some memory or raise "
      "the limit");
}

Finding find_gpus() {
  const cluster::NvmlFindings nvml = cluster::Nvml().find();
  if (!nvml.library) {
    if (::access("/dev/nvidiactl", F_OK) == 0) {
      return warning(
          "a device is there, but not libnvidia-ml.so.1",
          "mount the driver's libraries (NVIDIA container toolkit)");
    }
    return fine("none; ranks use the processor");
  }
  if (nvml.error != 0) {
    return warning(
        "the driver's library does not start (NVML error " +
            std::to_string(nvml.error) + ")",
        "does nvidia-smi work? load the driver, or restart after an update");
  }
  if (nvml.gpus.empty()) {
    return fine("a driver, but no device; ranks use the processor");
  }
  return fine(gpus_text(nvml));
}

Finding find_links() {
  const cluster::LocalMachine machine = cluster::look_at_machine();
  std::string text;
  const auto add = [&](const std::string& name, double bandwidth) {
    if (bandwidth <= 0) return;
    text +=
        (text.empty() ? "" : ", ") + name + " " +
        cluster::quantity_text(
            std::round(bandwidth / 1e8) * 1e8, cluster::Unit::bytes_per_second);
  };
  if (!machine.nvml.gpus.empty()) {
    const cluster::Gpu& gpu = machine.nvml.gpus.front();
    add(format(
            "NVLink {} x{} to {}", gpu.nvlink_version, gpu.nvlinks,
            gpu.nvswitch ? "a switch" : "other GPUs"),
        cluster::nvlink_bytes_per_second(gpu));
    add(format("PCIe {} x{}", gpu.pcie_generation, gpu.pcie_lanes),
        cluster::pcie_bytes_per_second(gpu.pcie_generation, gpu.pcie_lanes));
  }
  for (const auto& adapter : machine.adapters) {
    add((adapter.infiniband ? "InfiniBand " : "Ethernet ") + adapter.name,
        adapter.bytes_per_second);
  }
  if (text.empty()) text = "no adapter reports its bandwidth";
  return fine(text);
}

Finding find_local_cluster() {
  try {
    const cluster::Cluster cluster = cluster::find_cluster("local");
    const auto& node = cluster.groups.front().node;
    return fine(format(
        "local = {} x {} of {} ({}), as `echelon doctor --cluster` writes "
        "it",
        node.num_devices, node.device.name,
        format_bytes(node.device.memory_bytes), cluster.name));
  } catch (const Error& error) {
    return warning(
        error.what(), "`echelon bench --save here.toml` measures this machine");
  }
}

Finding find_shared_memory() {
  struct statvfs disk {};
  if (::statvfs("/dev/shm", &disk) != 0) {
    return warning(
        std::strerror(errno),
        "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm");
  }
  const double block = static_cast<double>(disk.f_frsize);
  const double size = block * static_cast<double>(disk.f_blocks);
  const double free = block * static_cast<double>(disk.f_bavail);
  const std::string text =
      format_bytes(free) + " free of " + format_bytes(size);
  return warning_if(
      free < 64 * kMiB, text,
      "remove old files there, or enlarge it: docker run --shm-size=1g, "
      "or mount -o remount,size=1g /dev/shm");
}

Finding find_memfd() {
  constexpr size_t kBytes = 1 << 20;
  const int file = ::memfd_create("echelon-doctor", MFD_CLOEXEC);
  void* map = MAP_FAILED;
  if (file >= 0 && ::ftruncate(file, kBytes) == 0) {
    map = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  const int error = errno;
  if (map != MAP_FAILED) {
    std::memset(map, 1, kBytes);
    ::munmap(map, kBytes);
  }
  if (file >= 0) ::close(file);
  if (map == MAP_FAILED) {
    return failure(
        std::string("memfd_create: ") + std::strerror(error),
        "allow memfd_create in the sandbox (seccomp), or use "
        "comm.backend = \"gloo\"");
  }
  return fine("works: ranks can share memory");
}

Finding find_pidfd() {
  const long file = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  if (file < 0) {
    return failure(
        std::string("pidfd_open: ") + std::strerror(errno),
        "Linux 5.3 or newer has it; allow pidfd_open in the sandbox "
        "(seccomp)");
  }
  ::close(static_cast<int>(file));
  return fine("works: the end of a rank is noticed at once");
}

Finding find_open_files() {
  const rlimit limit = limit_of(RLIMIT_NOFILE);
  const std::string text = limit_text(limit.rlim_cur) + " (hard limit " +
                           limit_text(limit.rlim_max) + ")";
  return warning_if(
      limit.rlim_cur < 1024, text, "raise the limit: ulimit -n 65536");
}

Finding find_processes() {
  const rlimit limit = limit_of(RLIMIT_NPROC);
  const std::string text =
      limit_text(limit.rlim_cur) + " processes and threads";
  return warning_if(
      limit.rlim_cur < 1024, text, "raise the limit: ulimit -u 4096");
}

Finding find_locked_memory() {
  const rlimit limit = limit_of(RLIMIT_MEMLOCK);
  const std::string text =
      limit.rlim_cur == RLIM_INFINITY
          ? "unlimited"
          : format_bytes(static_cast<double>(limit.rlim_cur));
  // Only RDMA needs it.
  return warning_if(
      limit.rlim_cur != RLIM_INFINITY && ::access("/dev/infiniband", F_OK) == 0,
      text, "RDMA needs it unlimited: ulimit -l unlimited");
}

Finding find_ports() {
  const int file = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool bound =
      file >= 0 &&
      ::bind(file, reinterpret_cast<sockaddr*>(&address), sizeof(address)) ==
          0 &&
      ::listen(file, 1) == 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  if (!bound) {
    return failure(
        std::string("no port on 127.0.0.1: ") + std::strerror(error),
        "bring loopback up: ip link set lo up");
  }
  std::ifstream range("/proc/sys/net/ipv4/ip_local_port_range");
  int low = 0, high = 0;
  range >> low >> high;
  std::string text = "free ones on 127.0.0.1";
  if (high > low) text += format(", from {} to {}", low, high);
  return fine(text);
}

Finding find_hostname() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(name, nullptr, nullptr, &found);
  if (error != 0) {
    return warning(
        std::string(name) + " does not resolve: " + ::gai_strerror(error),
        format(
            "several hosts need it: add a line with its address and \"{}\" to "
            "/etc/hosts",
            name));
  }
  char address[256] = "";
  ::getnameinfo(
      found->ai_addr, found->ai_addrlen, address, sizeof(address), nullptr, 0,
      NI_NUMERICHOST);
  ::freeaddrinfo(found);
  return fine(std::string(name) + " is " + address);
}

// --- All checks -------------------------------------------------------------

constexpr struct {
  const char* topic;
  Finding (*find)();
} kChecks[] = {
    {"built with", find_compiler},
    {"LibTorch", find_libtorch},
    {"processor", find_processor},
    {"memory", find_memory},
    {"GPUs", find_gpus},
    {"links", find_links},
    {"cluster", find_local_cluster},
    {"/dev/shm", find_shared_memory},
    {"memfd", find_memfd},
    {"pidfd", find_pidfd},
    {"open files", find_open_files},
    {"processes", find_processes},
    {"locked memory", find_locked_memory},
    {"ports", find_ports},
    {"host name", find_hostname},
    {"all_reduce", find_all_reduce}};

// By level.
constexpr struct {
  const char* word;
  const char* colour;
} kLevels[] = {
    {"ok", "\033[32m"}, {"warning", "\033[33m"}, {"error", "\033[31;1m"}};

constexpr size_t kWordWidth = 7;    // "warning"
constexpr size_t kTopicWidth = 13;  // "locked memory"

void print(const std::string& topic, const Finding& finding) {
  // Without a terminal, lines are not wrapped.
  const Style style = terminal_style(std::numeric_limits<size_t>::max());
  const auto& [word, colour] = kLevels[static_cast<size_t>(finding.level)];
  const std::string level = word;
  std::cout << "  " << (style.colours ? colour : "") << level
            << (style.colours ? "\033[0m" : "")
            << std::string(kWordWidth - level.size() + 2, ' ') << topic
            << std::string(kTopicWidth + 2 - topic.size(), ' ') << finding.text
            << "\n";
  if (!finding.remedy.empty()) {
    constexpr size_t kIndent = 2 + kWordWidth + 2 + kTopicWidth + 2;
    std::cout << std::string(kIndent, ' ')
              << wrapped(
                     "remedy: " + finding.remedy, kIndent,
                     std::max<size_t>(style.columns, 60))
              << "\n";
  }
  std::cout.flush();
}

void print_sum(int warnings, int errors) {
  if (errors > 0) {
    std::cout << format(
        "\n{} and {}\n", counted(errors, "error"),
        counted(warnings, "warning"));
  } else {
    std::cout << format(
        "\nno errors, {}\n",
        warnings > 0 ? counted(warnings, "warning") : "no warnings");
  }
}

int examine(bool json) {
  auto rows = nlohmann::ordered_json::array();
  int warnings = 0, errors = 0;
  for (const auto& [topic, find] : kChecks) {
    const Finding finding = find();
    warnings += finding.level == Level::warning;
    errors += finding.level == Level::error;
    if (json) {
      rows.push_back(
          {{"topic", topic},
           {"level", kLevels[static_cast<size_t>(finding.level)].word},
           {"text", finding.text},
           {"remedy", finding.remedy}});
    } else {
      print(topic, finding);
    }
  }
  if (json) {
    print_json(rows, std::cout);
  } else {
    print_sum(warnings, errors);
  }
  return errors > 0 ? 1 : 0;
}

struct DoctorArguments {
  bool json = false;
  bool cluster = false;
};

int doctor(const DoctorArguments& arguments) {
  if (!arguments.cluster) return examine(arguments.json);
  if (arguments.json) {
    throw ConfigError(
        "--json and --cluster: the cluster is printed as TOML; give one of the "
        "two");
  }
  std::cout << cluster::to_toml(cluster::find_cluster("local"));
  return 0;
}

}  // namespace

void add_doctor(Command& root) {
  auto [command, arguments] = root.add(
      "doctor", "check this machine, and name a remedy for each problem",
      "echelon doctor\nechelon doctor --json\n"
      "echelon doctor --cluster > here.toml",
      doctor);
  command.flag("--json", arguments.json, "print the findings as JSON");
  command.flag(
      "--cluster", arguments.cluster,
      "print this machine as a cluster file (TOML) and nothing else");
}

}  // namespace echelon::cli
