// The looking process writes a line for each finding as it comes, those of the
// host first, since NVML may take long to start. The launcher reads until the
// process ends or the time is over, and kills it.
#include "echelon/launch/health.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <sstream>

#include "echelon/cluster/host.h"
#include "echelon/cluster/nvml.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/units.h"

namespace echelon::launch {
namespace {

using Tell = std::function<void(const std::string& text, bool final)>;

constexpr double kFullDisk = 1 << 20;

void look_at_folder(const HostNeeds& needs, const Tell& tell) {
  if (needs.folder.empty()) return;
  std::filesystem::path folder = needs.folder;
  std::error_code error;
  while (!folder.empty() && !std::filesystem::exists(folder, error)) {
    folder = folder.parent_path();
  }
  if (folder.empty()) folder = ".";
  if (::access(folder.c_str(), W_OK) != 0) {
    tell(
        format(
            "{} cannot be written: {}", folder.string(), std::strerror(errno)),
        false);
    return;
  }
  struct statvfs disk {};
  if (::statvfs(folder.c_str(), &disk) != 0 || disk.f_blocks == 0) return;
  const double free =
      static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
  if (free >= std::max(needs.disk_bytes, kFullDisk)) return;
  std::string text =
      format("the disk of {} has {} left", folder.string(), format_bytes(free));
  if (needs.disk_bytes > free) {
    text += ", and a checkpoint needs about " + format_bytes(needs.disk_bytes);
  }
  tell(text, false);
}

void look_at_memory(const HostNeeds& needs, const Tell& tell) {
  if (needs.memory_bytes <= 0) return;
  double free = cluster::host_memory().free_bytes;
  std::string where = "free";
  const auto group = cluster::memory_group();
  if (group.limit_bytes > 0 && group.limit_bytes - group.used_bytes < free) {
    free = std::max(0.0, group.limit_bytes - group.used_bytes);
    where = "left in this job's control group";
  }
  if (free <= 0 || free >= needs.memory_bytes) return;
  tell(
      format(
          "{} of memory are {}, and the ranks need about {}",
          format_bytes(free), where, format_bytes(needs.memory_bytes)),
      false);
}

void look_at_gpus(const HostNeeds& needs, const Tell& tell) {
  if (!needs.gpus) return;
  auto visible = needs.visible_gpus;
  const char* own = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible && own != nullptr) visible = own;
  for (const auto& gpu : cluster::Nvml().health(visible)) {
    const auto say = [&](const std::string& text, bool final = false) {
      tell(format("GPU {} {}", gpu.index, text), final);
    };
    if (gpu.lost) {
      say("is lost, says its driver (NVML); start this host again, or take the "
          "GPU out of CUDA_VISIBLE_DEVICES",
          true);
    }
    if (gpu.needs_reset) {
      say("needs a reset, says its driver (NVML): nvidia-smi --gpu-reset, or "
          "take the GPU out of CUDA_VISIBLE_DEVICES",
          true);
    }
    if (gpu.ecc_errors > 0) {
      say(format(
          "has had {} that could not be corrected",
          counted(gpu.ecc_errors, "memory error")));
    }
    if (gpu.bad_memory_pending) {
      say("has bad memory, which a reset takes out of use");
    }
    if (gpu.no_spare_rows) {
      say("has bad memory and no spare rows left: replace it");
    }
    if (gpu.hot) say("is slowed down, because it is hot");
    if (gpu.short_of_power) say("is slowed down by its power supply");
  }
}

void look(
    const HostNeeds& needs, const HealthBefore& before, const Tell& tell) {
  look_at_memory(needs, tell);
  look_at_folder(needs, tell);
  const int cores = cluster::available_cores();
  if (cores < before.cores) {
    tell(
        format(
            "{} left of {} that the job began with", counted(cores, "core"),
            before.cores),
        false);
  }
  if (needs.gpus && ::access("/dev/nvidiactl", F_OK) == 0) {
    for (const auto& text : find_gpu_errors(before.kernel_us)) {
      tell(text, false);
    }
  }
  look_at_gpus(needs, tell);
}

[[noreturn]] void
look_and_end(const HostNeeds& needs, const HealthBefore& before, int output) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    look(needs, before, [&](const std::string& text, bool final) {
      const std::string line = (final ? "!" : " ") + plain(text) + "\n";
      (void)!::write(output, line.data(), line.size());
    });
  } catch (const std::exception&) {  // the job does not depend on it
  }
  ::_exit(0);
}

}  // namespace

HealthBefore HealthBefore::now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return {
      cluster::available_cores(),
      int64_t{time.tv_sec} * 1'000'000 + time.tv_nsec / 1000};
}

std::optional<std::string> visible_gpus(const Variables& environment) {
  std::optional<std::string> visible;
  for (const auto& [name, value] : environment) {
    if (name == "CUDA_VISIBLE_DEVICES") visible = value;
  }
  return visible;
}

std::vector<HealthFinding> look_at_host(
    const HostNeeds& needs, const HealthBefore& before,
    std::chrono::milliseconds most) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {};
  const pid_t process = ::fork();
  if (process == 0) look_and_end(needs, before, ends[1]);
  ::close(ends[1]);
  std::string text;
  const auto deadline = std::chrono::steady_clock::now() + most;
  while (process > 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd file{ends[0], POLLIN, 0};
    if (left.count() <= 0) break;
    if (::poll(&file, 1, static_cast<int>(left.count())) <= 0) continue;
    char block[4096];
    const ssize_t got = ::read(ends[0], block, sizeof block);
    if (got <= 0) break;
    text.append(block, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  if (process > 0) {
    ::kill(process, SIGKILL);
    // One that hangs in the kernel is not waited for.
    for (int i = 0; i < 20 && ::waitpid(process, nullptr, WNOHANG) == 0; ++i) {
      ::usleep(100);
    }
  }
  std::vector<HealthFinding> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) found.push_back({line.substr(1), line[0] == '!'});
  }
  return found;
}

// A line is "6,1234,987654321,-;NVRM: Xid (PCI:0000:17:00): 79, pid=…, GPU has
// fallen off the bus."; the third number is a time in microseconds.
std::vector<std::string>
find_gpu_errors(int64_t since_us, const std::filesystem::path& messages) {
  std::vector<std::string> found;
  const int file = ::open(messages.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return found;
  std::string text;
  char block[8192];  // a read of the kernel's file gives one message
  for (;;) {
    const ssize_t got = ::read(file, block, sizeof block);
    if (got < 0 && errno == EPIPE) continue;  // it was overwritten meanwhile
    if (got <= 0) break;
    text.append(block, static_cast<size_t>(got));
  }
  ::close(file);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find("NVRM: Xid ");
    if (at == std::string::npos) continue;
    const size_t time = line.find(',', line.find(',') + 1);
    if (time > at || std::strtoll(&line[time + 1], nullptr, 10) < since_us) {
      continue;
    }
    found.push_back("the kernel says: " + line.substr(at));
  }
  return found;
}

}  // namespace echelon::launch
