#include "echelon/cluster/host.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

namespace echelon::cluster {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "cpu.max" of cgroup v2 holds "<quota> <period>" or "max <period>".
int cgroup_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) {
    return std::max(1, static_cast<int>(quota / period));
  }
  return 1 << 20;
}

// A line of /proc/meminfo, in bytes; 0 when it is not there.
double meminfo(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name + ":", 0) == 0) {
      return std::strtod(line.c_str() + name.size() + 1, nullptr) * 1024;
    }
  }
  return 0;
}

// This process' cgroup limit (version 2, or 1); 0: none.
double cgroup_memory() {
  std::ifstream groups("/proc/self/cgroup");
  std::vector<std::string> files = {
      "/sys/fs/cgroup/memory/memory.limit_in_bytes",
      "/sys/fs/cgroup/memory.max"};
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) {
      files.push_back("/sys/fs/cgroup" + line.substr(3) + "/memory.max");
    }
  }
  double smallest = 0;
  for (const auto& file : files) {
    const double limit = std::strtod(first_line(file).c_str(), nullptr);
    // Version 1 says "no limit" with a number near 2^63.
    if (limit > 0 && limit < 0x1p60 && (smallest == 0 || limit < smallest)) {
      smallest = limit;
    }
  }
  return smallest;
}

// The number in a line "name number", or in the first line when `name` is
// empty.
std::optional<double>
number_in(const std::filesystem::path& path, const std::string& name = "") {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    char* end = nullptr;
    const double number = std::strtod(line.c_str() + name.size(), &end);
    if (*end != '\0') return std::nullopt;  // "max"
    return number;
  }
  return std::nullopt;
}

// The files of one version of control groups.
struct MemoryFiles {
  std::filesystem::path mount;  // below sys/fs/cgroup
  const char* killed;
  const char* limit;
  const char* peak;
  const char* used;
  const char* dropped;  // in memory.stat
};
const MemoryFiles kVersion1 = {
    "memory",
    "memory.oom_control",
    "memory.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file "};
const MemoryFiles kVersion2 = {
    "",
    "memory.events",
    "memory.max",
    "memory.peak",
    "memory.current",
    "inactive_file "};

MemoryGroup read_group(
    const std::filesystem::path& mount, std::filesystem::path group,
    const MemoryFiles& files) {
  MemoryGroup found;
  // In a container the path may be the one that the host sees.
  if (!std::filesystem::exists(mount / group / files.killed)) group = "";
  if (const auto killed =
          number_in(mount / group / files.killed, "oom_kill ")) {
    found.killed = static_cast<int64_t>(*killed);
  }
  for (;; group = group.parent_path()) {
    const double limit = number_in(mount / group / files.limit).value_or(0);
    // Version 1 says "no limit" with a number near 2^63.
    if (limit > 0 && limit < 0x1p60 &&
        (found.limit_bytes == 0 || limit < found.limit_bytes)) {
      found.limit_bytes = limit;
      found.peak_bytes = number_in(mount / group / files.peak).value_or(0);
      found.used_bytes =
          number_in(mount / group / files.used).value_or(0) -
          number_in(mount / group / "memory.stat", files.dropped).value_or(0);
    }
    if (group.empty()) return found;
  }
}

// Two units of fused multiply-add, as wide as the flags say.
int flops_per_cycle(const std::string& flags) {
  std::istringstream words(flags);
  int most = 8;
  for (std::string word; words >> word;) {
    if (word == "avx2" || word == "asimd") most = std::max(most, 32);
    if (word == "avx512f") most = std::max(most, 64);
  }
  return most;
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0
                        ? CPU_COUNT(&set)
                        : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(cores, cgroup_cores()));
}

MemoryGroup memory_group(const std::filesystem::path& root) {
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "4:memory:/path" of version 1, "0::/path" of version 2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers != "memory") continue;
    const auto& files = controllers.empty() ? kVersion2 : kVersion1;
    const auto found = read_group(
        root / "sys/fs/cgroup" / files.mount,
        std::filesystem::path(line.substr(second + 1)).relative_path(), files);
    if (found.killed) return found;
  }
  MemoryGroup host;
  if (const auto killed = number_in(root / "proc/vmstat", "oom_kill ")) {
    host.killed = static_cast<int64_t>(*killed);
  }
  return host;
}

HostMemory host_memory() {
  return {meminfo("MemTotal"), meminfo("MemAvailable"), cgroup_memory()};
}

Processor parse_cpuinfo(const std::string& text) {
  Processor processor;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    std::string key = line.substr(0, colon);
    while (!key.empty() && (key.back() == '\t' || key.back() == ' ')) {
      key.pop_back();
    }
    const std::string value = line.substr(std::min(colon + 2, line.size()));
    if (key == "model name" && processor.name.empty()) processor.name = value;
    if (key == "cpu MHz") {
      processor.hertz =
          std::max(processor.hertz, std::strtod(value.c_str(), nullptr) * 1e6);
    }
    if ((key == "flags" || key == "Features") &&
        processor.fp32_flops_per_cycle == 0) {
      processor.fp32_flops_per_cycle = flops_per_cycle(value);
    }
  }
  return processor;
}

Processor find_host_processor() {
  std::ifstream file("/proc/cpuinfo");
  std::stringstream text;
  text << file.rdbuf();
  return parse_cpuinfo(text.str());
}

}  // namespace echelon::cluster
