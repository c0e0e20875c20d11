#include "echelon/launch/output.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace echelon::launch {
namespace {

constexpr auto kPrompt = std::chrono::milliseconds(500);
constexpr auto kProgress = std::chrono::seconds(5);
// A file that poll() calls writable takes this much without blocking.
constexpr size_t kWriteBytes = 4096;

}  // namespace

void LineCutter::feed(std::string_view bytes, TimePoint now, const Sink& sink) {
  if (!bytes.empty()) {
    last_byte_ = now;
  }
  while (!bytes.empty()) {
    const size_t stop = bytes.find_first_of("\r\n");
    const std::string_view text = bytes.substr(0, stop);
    if (!text.empty()) {
      if (after_return_) {
        line_.clear();
        after_return_ = false;
      }
      line_.append(text);
      for (size_t piece; line_.size() > kMaxLine;) {
        piece = kMaxLine;
        sink(std::string_view(line_).substr(0, piece));
        line_.erase(0, piece);
        last_given_ = now;
      }
    }
    if (stop == std::string_view::npos) {
      return;
    }
    if (bytes[stop] == '\n') {
      sink(line_);
      line_.clear();
      after_return_ = false;
      last_given_ = now;
    } else {
      after_return_ = true;
    }
    bytes.remove_prefix(stop + 1);
  }
}

void LineCutter::give(TimePoint now, const Sink& sink) {
  sink(line_);
  line_.clear();
  after_return_ = false;
  last_given_ = now;
}

void LineCutter::feed_idle(TimePoint now, const Sink& sink) {
  if (line_.empty()) {
    return;
  }
  if (now - last_byte_ >= kPrompt ||
      (after_return_ && now - last_given_ >= kProgress)) {
    give(now, sink);
  }
}

void LineCutter::finish(const Sink& sink) {
  if (!line_.empty()) {
    give(last_byte_, sink);
  }
}

void Tail::add(std::string_view bytes) {
  if (bytes.size() >= kBytes) {
    bytes_.assign(bytes.substr(bytes.size() - kBytes));
    return;
  }
  bytes_.append(bytes);
  if (bytes_.size() > 2 * kBytes) {
    bytes_.erase(0, bytes_.size() - kBytes);
  }
}

std::string Tail::text() const {
  return bytes_.size() <= kBytes ? bytes_
                                 : bytes_.substr(bytes_.size() - kBytes);
}

Screen::Screen(int out, int err) : files_{-1, out, err} {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool wanted = (no_color == nullptr || *no_color == '\0') &&
                      (term == nullptr || std::string_view(term) != "dumb");
  for (int stream = 1; stream <= 2; ++stream) {
    terminal_[stream] = isatty(files_[stream]) == 1;
    colours_[stream] = terminal_[stream] && wanted;
  }
}

void Screen::write(int stream, std::string_view bytes) {
  if (broken_[stream] || bytes.empty()) {
    return;
  }
  queued_bytes_ += bytes.size();
  if (!queue_.empty() && queue_.back().stream == stream &&
      queue_.back().bytes.size() < kFull / 4) {
    queue_.back().bytes.append(bytes);
  } else {
    queue_.push_back({stream, std::string(bytes)});
  }
}

int Screen::pending_file() const {
  return queue_.empty() ? -1 : files_[queue_.front().stream];
}

bool Screen::write_some() {
  pollfd file{pending_file(), POLLOUT, 0};
  if (poll(&file, 1, 0) != 1) {
    return false;
  }
  Chunk& chunk = queue_.front();
  const size_t size = std::min(kWriteBytes, chunk.bytes.size() - chunk.written);
  const ssize_t done =
      ::write(files_[chunk.stream], chunk.bytes.data() + chunk.written, size);
  if (done < 0) {
    if (errno == EAGAIN || errno == EINTR) {
      return false;
    }
    broken_[chunk.stream] = true;
    const int stream = chunk.stream;
    for (const auto& lost : queue_) {
      queued_bytes_ -=
          lost.stream == stream ? lost.bytes.size() - lost.written : 0;
    }
    std::erase_if(
        queue_, [&](const Chunk& lost) { return lost.stream == stream; });
    return true;
  }
  chunk.written += done;
  queued_bytes_ -= done;
  if (chunk.written == chunk.bytes.size()) {
    queue_.pop_front();
  }
  return true;
}

void Screen::pump() {
  while (!queue_.empty() && write_some()) {
  }
}

void Screen::drain(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (pump(); !queue_.empty(); pump()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd file{pending_file(), POLLOUT, 0};
    if (left.count() <= 0 || poll(&file, 1, left.count()) == 0) {
      return;
    }
  }
}

std::string safe_for_terminal(std::string_view line) {
  std::string text;
  bool coloured = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const unsigned char c = line[i];
    if (c == 0x1b) {
      size_t end = i + 1;
      if (end < line.size() && line[end] == '[') {
        ++end;
        while (end < line.size() &&
               ((line[end] >= '0' && line[end] <= '9') || line[end] == ';')) {
          ++end;
        }
        if (end < line.size() && line[end] == 'm') {
          text.append(line.substr(i, end - i + 1));
          coloured = true;
        }
      }
      i = std::min(end, line.size() - 1);
    } else {
      text += (c < 0x20 && c != '\t') || c == 0x7f ? '?' : line[i];
    }
  }
  return coloured ? text + "\x1b[0m" : text;
}

std::string rank_prefix(int rank, int world_size, bool colours) {
  std::string number = std::to_string(rank);
  const size_t width = std::to_string(world_size - 1).size();
  number.insert(0, width - std::min(width, number.size()), ' ');
  const std::string text = "[" + number + "]";
  if (!colours) {
    return text + " ";
  }
  static constexpr const char* kColours[] = {"36", "33", "35", "32",
                                             "34", "96", "93", "95"};
  return std::string("\x1b[") + kColours[rank % 8] + "m" + text + "\x1b[0m ";
}

}  // namespace echelon::launch
