// What this host's memory has left. Free of LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace echelon {

/// Bytes that processes can still have without swapping: what the kernel says
/// is available (MemAvailable of /proc/meminfo) or, where that is less, what
/// the control group of a container leaves (memory.max less memory.current, its
/// file cache not counted). None where the kernel does not tell.
///
///   root  of the file system that has proc/ and sys/
std::optional<int64_t>
available_host_bytes(const std::filesystem::path& root = "/");

}  // namespace echelon
