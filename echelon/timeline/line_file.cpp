// Lines are appended with O_APPEND, and a reader takes every line that has its
// newline. Half a line is cut off: by the write that failed half way, or by the
// next writer when a process was killed.
#include "echelon/timeline/line_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <system_error>

#include "echelon/text/text_file.h"

namespace echelon::timeline {
namespace {

// The bytes up to the last newline, with it.
int64_t whole_lines_size(int file, int64_t size) {
  char block[4096];
  while (size > 0) {
    const int64_t begin = size > 4096 ? size - 4096 : 0;
    const ssize_t count = ::pread(file, block, size - begin, begin);
    if (count <= 0) return size;
    for (ssize_t i = count - 1; i >= 0; --i) {
      if (block[i] == '\n') return begin + i + 1;
    }
    size = begin;
  }
  return 0;
}

}  // namespace

LineFile::~LineFile() {
  if (file_ >= 0) ::close(file_);
}

int LineFile::open(const std::filesystem::path& path) {
  std::error_code ignored;
  if (path.has_parent_path()) {
    std::filesystem::create_directories(path.parent_path(), ignored);
  }
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) return errno;
  struct stat status {};
  if (::fstat(file_, &status) != 0) return 0;
  size_ = whole_lines_size(file_, status.st_size);
  if (size_ < status.st_size && ::ftruncate(file_, size_) != 0) return errno;
  return 0;
}

int LineFile::append(std::string& lines) {
  if (torn_ && ::ftruncate(file_, size_) != 0) return errno;
  torn_ = false;
  std::string_view rest = lines;
  const int error = write_all(file_, rest);
  const size_t done = lines.size() - rest.size();
  const auto written = std::string_view(lines).substr(0, done);
  const size_t whole = written.rfind('\n') + 1;  // none: 0
  size_ += static_cast<int64_t>(whole);
  num_lines_ += std::ranges::count(written, '\n');
  // Where it cannot be cut now, readers leave half a line at the end out.
  torn_ = whole < done && ::ftruncate(file_, size_) != 0;
  lines.erase(0, whole);
  return error;
}

}  // namespace echelon::timeline
