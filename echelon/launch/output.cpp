// A rank's bytes go from its pipe into its log, as they are, and onto the
// screen, by lines. Nothing waits for the screen: it queues what its file does
// not take yet, and while the queue is full the launcher reads no more, so that
// the ranks' own pipes fill up and slow the ranks down. The log is written at
// once, since writing a file does not wait for a reader.
#include "echelon/launch/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"

namespace echelon::launch {
namespace {

constexpr auto kPrompt = std::chrono::milliseconds(500);
constexpr auto kProgress = std::chrono::seconds(5);
// A file that poll() calls writable takes this much without blocking.
constexpr size_t kWriteBytes = 4096;

}  // namespace

void LineSplitter::feed(
    std::string_view bytes, TimePoint now, const Sink& sink) {
  if (!bytes.empty()) last_byte_ = now;
  while (!bytes.empty()) {
    const size_t stop = bytes.find_first_of("\r\n");
    const std::string_view text = bytes.substr(0, stop);
    if (!text.empty()) {
      if (after_return_) {
        line_.clear();
        after_return_ = false;
      }
      line_.append(text);
      while (line_.size() > kMaxLine) {
        sink(std::string_view(line_).substr(0, kMaxLine));
        line_.erase(0, kMaxLine);
        last_emitted_ = now;
      }
    }
    if (stop == std::string_view::npos) return;
    if (bytes[stop] == '\n') {
      emit(now, sink);
    } else {
      // Only the next text clears the line: \r\n must end it as \n does.
      after_return_ = true;
    }
    bytes.remove_prefix(stop + 1);
  }
}

void LineSplitter::emit(TimePoint now, const Sink& sink) {
  sink(line_);
  line_.clear();
  after_return_ = false;
  last_emitted_ = now;
}

// A line without an end is shown after a while of silence, since it may be a
// prompt. A progress bar, which rewrites its line, is shown every few seconds.
void LineSplitter::feed_idle(TimePoint now, const Sink& sink) {
  if (line_.empty()) return;
  if (now - last_byte_ >= kPrompt ||
      (after_return_ && now - last_emitted_ >= kProgress)) {
    emit(now, sink);
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (!line_.empty()) emit(last_byte_, sink);
}

void Tail::add(std::string_view bytes) {
  if (bytes.size() >= kBytes) {
    bytes_.assign(bytes.substr(bytes.size() - kBytes));
    return;
  }
  bytes_.append(bytes);
  if (bytes_.size() > 2 * kBytes) bytes_.erase(0, bytes_.size() - kBytes);
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
  if (broken_[stream] || bytes.empty()) return;
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
  if (poll(&file, 1, 0) != 1) return false;
  Chunk& chunk = queue_.front();
  const size_t size = std::min(kWriteBytes, chunk.bytes.size() - chunk.written);
  const ssize_t done =
      ::write(files_[chunk.stream], chunk.bytes.data() + chunk.written, size);
  if (done < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
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
  if (chunk.written == chunk.bytes.size()) queue_.pop_front();
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
    if (left.count() <= 0 || poll(&file, 1, left.count()) == 0) return;
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
      const size_t end = std::min(line.find('\x1b', i), line.size());
      text += plain(line.substr(i, end - i), "\t");
      i = end - 1;
    }
  }
  // The next line may be another rank's, and must not take on the colour.
  return coloured ? text + "\x1b[0m" : text;
}

std::string rank_prefix(int rank, int world_size, bool colours) {
  std::string number = std::to_string(rank);
  const size_t width = std::to_string(world_size - 1).size();
  number.insert(0, width - std::min(width, number.size()), ' ');
  const std::string text = "[" + number + "]";
  if (!colours) return text + " ";
  static constexpr const char* kColours[] = {"36", "33", "35", "32",
                                             "34", "96", "93", "95"};
  return format("\x1b[{}m{}\x1b[0m ", kColours[rank % 8], text);
}

RankOutput::RankOutput(
    Show show, const std::string& log_path, bool append, std::string error_file)
    : show_(show), error_file_(std::move(error_file)) {
  if (!log_path.empty()) {
    const int whole = append ? O_APPEND : O_TRUNC;
    log_ = FileDescriptor(
        open(log_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | whole, 0644));
    if (!log_.is_open()) {
      throw ConfigError(format(
          "[launch] cannot write the log {}: {}; choose another folder",
          log_path, std::strerror(errno)));
    }
  }
  for (int stream = show == Show::direct ? 2 : 1; stream <= 2; ++stream) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      throw ConfigError(format(
          "[launch] no pipe for a rank's output: {}; `ulimit -n` sets how many "
          "files may be open",
          std::strerror(errno)));
    }
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    lanes_[stream].read_end = FileDescriptor(ends[0]);
    lanes_[stream].write_end = FileDescriptor(ends[1]);
  }
}

bool RankOutput::read(int stream, TimePoint now, Screen& screen) {
  Lane& lane = lanes_[stream];
  if (!lane.read_end.is_open()) return false;
  char bytes[64 << 10];
  const ssize_t size = ::read(lane.read_end.fd(), bytes, sizeof bytes);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (size <= 0) {
    close_stream(stream);
    return false;
  }
  const std::string_view text(bytes, size);
  log(text);
  if (stream == 2) tail_.add(text);
  show(stream, stream == 2 ? before_report(text, now) : text, now, screen);
  return true;
}

// A rank writes its report before the same text to stderr, where nothing else
// follows (error_report.cpp). The text's first word may come in two reads, so
// what may be its begin waits for the rest.
std::string_view
RankOutput::before_report(std::string_view bytes, TimePoint now) {
  if (reported_) return {};
  if (error_file_.empty()) return bytes;
  constexpr std::string_view kBegin = "error: ";
  read_ = std::exchange(held_, {}).append(bytes);
  std::string_view text = read_;
  size_t at =
      begins_line_ && text.starts_with(kBegin) ? 0 : text.find("\nerror: ");
  if (at != std::string_view::npos &&
      ::access(error_file_.c_str(), F_OK) == 0) {
    reported_ = true;
    return text.substr(0, text[at] == '\n' ? at + 1 : at);
  }
  const size_t line = text.rfind('\n') + 1;  // 0 where there is no newline
  const std::string_view last = text.substr(line);
  if ((line > 0 || begins_line_) && kBegin.starts_with(last)) {
    held_ = last;
    held_since_ = now;
    text.remove_suffix(last.size());
  }
  if (!text.empty()) begins_line_ = text.back() == '\n';
  return text;
}

void RankOutput::show(
    int stream, std::string_view bytes, TimePoint now, Screen& screen) {
  Lane& lane = lanes_[stream];
  switch (show_) {
    case Show::hidden:
      return;
    case Show::raw:
    case Show::direct:
      screen.write(stream, bytes);
      return;
    case Show::plain: {
      lane.last_byte = now;
      lane.partial.append(bytes);
      const size_t end = lane.partial.size() > LineSplitter::kMaxLine
                             ? lane.partial.size()
                             : lane.partial.rfind('\n') + 1;
      screen.write(stream, std::string_view(lane.partial).substr(0, end));
      lane.partial.erase(0, end);
      return;
    }
    case Show::prefixed:
      lane.splitter.feed(bytes, now, sink(stream, screen));
  }
}

LineSplitter::Sink RankOutput::sink(int stream, Screen& screen) {
  return [this, stream, &screen](std::string_view line) {
    const std::string text = screen.is_terminal(stream)
                                 ? safe_for_terminal(line)
                                 : std::string(line);
    screen.write(stream, lanes_[stream].prefix + text + "\n");
  };
}

void RankOutput::show_held(TimePoint now, Screen& screen) {
  if (held_.empty()) return;
  begins_line_ = false;
  show(2, std::exchange(held_, {}), now, screen);
}

void RankOutput::idle(TimePoint now, Screen& screen) {
  if (now - held_since_ >= kPrompt) show_held(now, screen);
  for (int stream = 1; stream <= 2; ++stream) {
    Lane& lane = lanes_[stream];
    lane.splitter.feed_idle(now, sink(stream, screen));
    if (!lane.partial.empty() && now - lane.last_byte >= kPrompt) {
      screen.write(stream, std::exchange(lane.partial, {}));
    }
  }
}

bool RankOutput::waiting() const {
  return !held_.empty() ||
         std::any_of(lanes_, lanes_ + 3, [](const Lane& lane) {
           return lane.splitter.waiting() || !lane.partial.empty();
         });
}

void RankOutput::finish(Screen& screen) {
  show_held(held_since_, screen);
  for (int stream = 1; stream <= 2; ++stream) {
    close_stream(stream);
    lanes_[stream].splitter.finish(sink(stream, screen));
    screen.write(stream, std::exchange(lanes_[stream].partial, {}));
  }
}

void RankOutput::log(std::string_view bytes) {
  while (log_.is_open() && !bytes.empty()) {
    const ssize_t done = ::write(log_.fd(), bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      log_error_ = errno;
      log_.close();
      return;
    }
    bytes.remove_prefix(done);
  }
}

}  // namespace echelon::launch
