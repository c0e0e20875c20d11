// Cores and memory that this host gives a process, by affinity and cgroup.
#pragma once

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

struct Processor {
  std::string name;              // "AMD EPYC 9654"; empty: not known
  double hertz = 0;              // current; 0: not known
  int fp32_flops_per_cycle = 0;  // of a core, by its vector instructions
};
/// From /proc/cpuinfo, or a text like it.
Processor find_host_processor();
Processor parse_cpuinfo(const std::string& text);

}  // namespace echelon::cluster
