#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "echelon/cli/doctor.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/local_machine.h"
#include "echelon/cluster/quantity.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Level = Finding::Level;

constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

/// "8 x NVIDIA H100 80GB HBM3 with 80 GiB, driver 560.35.03 (CUDA 12.6)", with
/// a part for each kind of GPU.
std::string gpus_text(const NvmlFindings& nvml) {
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

}  // namespace

Finding find_processor() {
  const int cores = available_cores();
  const auto all = static_cast<int>(std::thread::hardware_concurrency());
  std::string text = counted(cores, "core");
  const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (cores < std::max<long>(all, online)) {
    text +=
        format(" of {}, by affinity or cgroup", std::max<long>(all, online));
  }
  if (cores < 2) {
    return {
        "processor", Level::warning, text,
        "ranks on one core take turns; give this machine or container more"};
  }
  return {"processor", Level::ok, text, ""};
}

Finding find_memory() {
  const HostMemory memory = host_memory();
  const double available = memory.free_bytes;
  const double limit = memory.limit_bytes;
  std::string text =
      format_bytes(available) + " free of " + format_bytes(memory.total_bytes);
  if (limit > 0 && limit < memory.total_bytes) {
    text += ", this cgroup may use " + format_bytes(limit);
  }
  const double usable = limit > 0 ? std::min(limit, available) : available;
  // A rank with LibTorch loaded takes about 250 MiB before its model.
  if (usable < kGiB) {
    return {
        "memory", Level::warning, text,
        "a rank needs about 250 MiB before its model; free some memory or "
        "raise the limit"};
  }
  return {"memory", Level::ok, text, ""};
}

Finding find_gpus() {
  const NvmlFindings nvml = ask_nvml();
  if (!nvml.library) {
    if (::access("/dev/nvidiactl", F_OK) == 0) {
      return {
          "GPUs", Level::warning,
          "a device is there, but not libnvidia-ml.so.1",
          "mount the driver's libraries (NVIDIA container toolkit)"};
    }
    return {"GPUs", Level::ok, "none; ranks use the processor", ""};
  }
  if (nvml.error != 0) {
    return {
        "GPUs", Level::warning,
        "the driver's library does not start (NVML error " +
            std::to_string(nvml.error) + ")",
        "does nvidia-smi work? load the driver, or restart after an update"};
  }
  if (nvml.gpus.empty()) {
    return {
        "GPUs", Level::ok, "a driver, but no device; ranks use the processor",
        ""};
  }
  return {"GPUs", Level::ok, gpus_text(nvml), ""};
}

Finding find_links() {
  const LocalMachine machine = look_at_machine();
  std::string text;
  const auto add = [&](const std::string& name, double bandwidth) {
    if (bandwidth <= 0) return;
    text += (text.empty() ? "" : ", ") + name + " " +
            quantity_text(
                std::round(bandwidth / 1e8) * 1e8, Unit::bytes_per_second);
  };
  if (!machine.nvml.gpus.empty()) {
    const Gpu& gpu = machine.nvml.gpus.front();
    add(format(
            "NVLink {} x{} to {}", gpu.nvlink_version, gpu.nvlinks,
            gpu.nvswitch ? "a switch" : "other GPUs"),
        nvlink_bytes_per_second(gpu));
    add(format("PCIe {} x{}", gpu.pcie_generation, gpu.pcie_lanes),
        pcie_bytes_per_second(gpu.pcie_generation, gpu.pcie_lanes));
  }
  for (const auto& adapter : machine.adapters) {
    add((adapter.infiniband ? "InfiniBand " : "Ethernet ") + adapter.name,
        adapter.bytes_per_second);
  }
  if (text.empty()) text = "no adapter reports its bandwidth";
  return {"links", Level::ok, text, ""};
}

Finding find_local_cluster() {
  try {
    const Cluster cluster = find_cluster("local");
    const Node& node = cluster.groups.front().node;
    return {
        "cluster", Level::ok,
        format(
            "local = {} x {} of {} ({}), as `echelon doctor --cluster` writes "
            "it",
            node.num_devices, node.device.name,
            format_bytes(node.device.memory_bytes), cluster.name),
        ""};
  } catch (const Error& error) {
    return {
        "cluster", Level::warning, error.what(),
        "`echelon bench --save here.toml` measures this machine"};
  }
}

Finding find_shared_memory() {
  struct statvfs disk {};
  if (::statvfs("/dev/shm", &disk) != 0) {
    return {
        "/dev/shm", Level::warning, std::strerror(errno),
        "mount a tmpfs there: mount -t tmpfs tmpfs /dev/shm"};
  }
  const double block = static_cast<double>(disk.f_frsize);
  const double size = block * static_cast<double>(disk.f_blocks);
  const double free = block * static_cast<double>(disk.f_bavail);
  const std::string text =
      format_bytes(free) + " free of " + format_bytes(size);
  if (free < 64 * kMiB) {
    return {
        "/dev/shm", Level::warning, text,
        "remove old files there, or enlarge it: docker run --shm-size=1g, "
        "or mount -o remount,size=1g /dev/shm"};
  }
  return {"/dev/shm", Level::ok, text, ""};
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
    return {
        "memfd", Level::error,
        std::string("memfd_create: ") + std::strerror(error),
        "allow memfd_create in the sandbox (seccomp), or use "
        "comm.backend = \"gloo\""};
  }
  return {"memfd", Level::ok, "works: ranks can share memory", ""};
}

Finding find_pidfd() {
  const long file = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  if (file < 0) {
    return {
        "pidfd", Level::error,
        std::string("pidfd_open: ") + std::strerror(errno),
        "Linux 5.3 or newer has it; allow pidfd_open in the sandbox "
        "(seccomp)"};
  }
  ::close(static_cast<int>(file));
  return {
      "pidfd", Level::ok, "works: the end of a rank is noticed at once", ""};
}

Finding find_open_files() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const std::string text = limit_text(limit.rlim_cur) + " (hard limit " +
                           limit_text(limit.rlim_max) + ")";
  if (limit.rlim_cur < 1024) {
    return {
        "open files", Level::warning, text, "raise the limit: ulimit -n 65536"};
  }
  return {"open files", Level::ok, text, ""};
}

Finding find_processes() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NPROC, &limit);
  const std::string text =
      limit_text(limit.rlim_cur) + " processes and threads";
  if (limit.rlim_cur < 1024) {
    return {
        "processes", Level::warning, text, "raise the limit: ulimit -u 4096"};
  }
  return {"processes", Level::ok, text, ""};
}

Finding find_locked_memory() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string text =
      limit.rlim_cur == RLIM_INFINITY
          ? "unlimited"
          : format_bytes(static_cast<double>(limit.rlim_cur));
  // Only RDMA needs it.
  if (limit.rlim_cur != RLIM_INFINITY &&
      ::access("/dev/infiniband", F_OK) == 0) {
    return {
        "locked memory", Level::warning, text,
        "RDMA needs it unlimited: ulimit -l unlimited"};
  }
  return {"locked memory", Level::ok, text, ""};
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
    return {
        "ports", Level::error,
        std::string("no port on 127.0.0.1: ") + std::strerror(error),
        "bring loopback up: ip link set lo up"};
  }
  std::istringstream range(
      first_line("/proc/sys/net/ipv4/ip_local_port_range"));
  int low = 0, high = 0;
  range >> low >> high;
  std::string text = "free ones on 127.0.0.1";
  if (high > low) text += format(", from {} to {}", low, high);
  return {"ports", Level::ok, text, ""};
}

Finding find_hostname() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(name, nullptr, nullptr, &found);
  if (error != 0) {
    return {
        "host name", Level::warning,
        std::string(name) + " does not resolve: " + ::gai_strerror(error),
        format(
            "several hosts need it: add a line with its address and \"{}\" to "
            "/etc/hosts",
            name)};
  }
  char address[256] = "";
  ::getnameinfo(
      found->ai_addr, found->ai_addrlen, address, sizeof(address), nullptr, 0,
      NI_NUMERICHOST);
  ::freeaddrinfo(found);
  return {"host name", Level::ok, std::string(name) + " is " + address, ""};
}

}  // namespace echelon::cli
