#include "echelon/train/host_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace echelon {
namespace {

// The number after `key` in a file of lines "key number …".
std::optional<int64_t>
number_of(const std::filesystem::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    try {
      return std::stoll(line.substr(key.size()));
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> available_host_bytes(const std::filesystem::path& root) {
  const auto kibibytes = number_of(root / "proc/meminfo", "MemAvailable:");
  if (!kibibytes) return std::nullopt;
  int64_t available = *kibibytes * 1024;
  const auto group = root / "sys/fs/cgroup";
  const auto most = number_of(group / "memory.max", "");
  const auto used = number_of(group / "memory.current", "");
  if (most && used) {
    const int64_t cache =
        number_of(group / "memory.stat", "inactive_file ").value_or(0);
    available =
        std::min(available, std::max<int64_t>(0, *most - *used + cache));
  }
  return available;
}

}  // namespace echelon
