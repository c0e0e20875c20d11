#include "echelon/monitoring/growing_file.h"

#include <unistd.h>

#include <algorithm>

namespace echelon::monitoring {

std::string read_at(int file, int64_t begin, int64_t size) {
  std::string text(static_cast<size_t>(std::max<int64_t>(0, size)), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::pread(
        file, text.data() + done, text.size() - done,
        static_cast<off_t>(begin) + static_cast<off_t>(done));
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  text.resize(done);
  return text;
}

int64_t read_lines(
    int file, int64_t begin, int64_t end,
    const std::function<void(int64_t begin, std::string_view lines)>& take) {
  constexpr int64_t kBlock = 1 << 20;
  while (begin < end) {
    const auto text = read_at(file, begin, std::min(end - begin, kBlock));
    const size_t size = text.rfind('\n') + 1;
    if (size > 0) {
      take(begin, std::string_view(text).substr(0, size));
      begin += static_cast<int64_t>(size);
    } else if (static_cast<int64_t>(text.size()) == kBlock) {
      begin += kBlock;
    } else {
      break;
    }
  }
  return begin;
}

}  // namespace echelon::monitoring
