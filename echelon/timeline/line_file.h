// A file of lines to which one process adds, and which others read meanwhile:
// a line that has its newline is whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace echelon::timeline {

class LineFile {
 public:
  LineFile() = default;
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// Opens the file, or makes it and its folders, and cuts off half a line at
  /// its end: its writer was killed, or the disk was full. Once. Returns 0, or
  /// errno of the call that failed.
  int open(const std::filesystem::path& path);
  /// Adds `lines`, and removes from them what the file then has. Returns 0, or
  /// errno; the rest is for a later call.
  int append(std::string& lines);
  /// Added by this object.
  int64_t num_lines() const { return num_lines_; }

 private:
  int file_ = -1;
  int64_t size_ = 0;  // bytes of whole lines
  int64_t num_lines_ = 0;
  bool torn_ = false;  // half a line is at the file's end
};

}  // namespace echelon::timeline
