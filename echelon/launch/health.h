// What is wrong with this host, told before a job's first start and after each
// failure: it may be the reason, and a restart would meet it again.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "echelon/launch/options.h"

namespace echelon::launch {

struct HealthFinding {
  std::string text;    // "runs/first is on a disk that is mounted read-only"
  bool final = false;  // a restart on this host cannot help
  bool operator==(const HealthFinding&) const = default;
};

/// The state of the host with which a job began, for what has changed since.
struct HealthBefore {
  int cores = 0;
  int64_t kernel_us = 0;  // the clock of the kernel's messages

  static HealthBefore now();
};

/// The CUDA_VISIBLE_DEVICES that ranks get by `environment`; none: the
/// launcher's own.
std::optional<std::string> visible_gpus(const Variables& environment);

/// Looks for at most `most`, in a process of its own: a driver or a file system
/// that does not answer does not stop the launcher, and what was found before
/// is returned. Must be called from a process with one thread.
std::vector<HealthFinding> look_at_host(
    const HostNeeds& needs, const HealthBefore& before,
    std::chrono::milliseconds most = std::chrono::milliseconds(50));

/// The errors of GPUs (Xid) in the kernel's messages after `since_us`, a text
/// for each; none where this user may not read them.
///
///   messages  tests have another file
std::vector<std::string> find_gpu_errors(
    int64_t since_us, const std::filesystem::path& messages = "/dev/kmsg");

}  // namespace echelon::launch
