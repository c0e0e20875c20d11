// A process's memory, as Linux counts it.
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>

namespace echelon {

/// "VmHWM" (the peak) or "VmRSS" of /proc/self/status, in bytes.
inline double memory_of(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(key + ":")) continue;
    return 1024 * std::atof(line.c_str() + key.size() + 1);
  }
  return 0;
}

}  // namespace echelon
