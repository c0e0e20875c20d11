// Cores and memory that this host gives a process, by affinity and cgroup.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace echelon::cluster {

/// Cores that this process may use: its affinity, and its cgroup's quota.
int available_cores();

struct HostMemory {
  double total_bytes = 0;
  double free_bytes = 0;   // available without swapping, by the kernel
  double limit_bytes = 0;  // of this process's cgroup; 0: none
};
HostMemory host_memory();

/// What the kernel says of the memory of this process's control group (version
/// 2, or 1).
struct MemoryGroup {
  /// Processes of the group that it has killed so far because memory ran out;
  /// without a group, of the host. None where it does not say.
  std::optional<int64_t> killed;
  double limit_bytes = 0;  // the lowest, of the group or one around it; 0: none
  double peak_bytes = 0;   // of the group with that limit; 0: not known
  double used_bytes = 0;   // the same, without what the kernel can drop at once
};
/// `root`: of the file system that has proc/ and sys/.
MemoryGroup memory_group(const std::filesystem::path& root = "/");

struct Processor {
  std::string name;              // "AMD EPYC 9654"; empty: not known
  double hertz = 0;              // current; 0: not known
  int fp32_flops_per_cycle = 0;  // of a core, by its vector instructions
};
/// From /proc/cpuinfo, or a text like it.
Processor find_host_processor();
Processor parse_cpuinfo(const std::string& text);

}  // namespace echelon::cluster
