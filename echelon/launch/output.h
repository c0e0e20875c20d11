// The ranks' output on its way to log files and the terminal. Nothing here
// blocks, and nothing grows without bound.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>

namespace echelon::launch {

/// Cuts one stream into lines. A carriage return starts the line anew, as on a
/// terminal, so a progress bar comes out as its last state.
class LineCutter {
 public:
  using Sink = std::function<void(std::string_view line)>;
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr size_t kMaxLine = 16 << 10;

  /// Calls `sink` for each whole line, without its newline. A line longer than
  /// kMaxLine comes in pieces.
  void feed(std::string_view bytes, TimePoint now, const Sink& sink);
  /// What waits for its newline, if nothing came for half a second: a prompt.
  /// Or what a progress bar shows, if it is redrawn for longer than 5 s.
  void feed_idle(TimePoint now, const Sink& sink);
  /// What waits for its newline, at the end of the stream.
  void finish(const Sink& sink);
  bool waiting() const { return !line_.empty(); }

 private:
  void give(TimePoint now, const Sink& sink);

  std::string line_;
  bool after_return_ = false;
  TimePoint last_byte_{};
  TimePoint last_given_{};
};

/// The last bytes of a stream.
class Tail {
 public:
  static constexpr size_t kBytes = 16 << 10;
  void add(std::string_view bytes);
  std::string text() const;

 private:
  std::string bytes_;  // up to twice kBytes, so that cutting is rare
};

/// The launcher's own stdout and stderr. Bytes queue up and are written when
/// poll() says that the file takes them, so a stopped terminal or a slow reader
/// never holds up signals or the watch over the ranks.
class Screen {
 public:
  static constexpr size_t kFull = 256 << 10;

  Screen(int out, int err);
  void write(int stream, std::string_view bytes);  // stream: 1 or 2
  /// The file descriptor to poll for POLLOUT; -1 when nothing is queued.
  int pending_file() const;
  /// Writes what the files take at once.
  void pump();
  /// Writes all, for at most `limit`.
  void drain(std::chrono::milliseconds limit);
  /// Too much is queued: do not read more from the ranks.
  bool full() const { return queued_bytes_ > kFull; }
  /// The reader of `stream` has gone away.
  bool broken(int stream) const { return broken_[stream]; }
  bool is_terminal(int stream) const { return terminal_[stream]; }
  /// A terminal that takes colours: a tty, without NO_COLOR and TERM=dumb.
  bool colours(int stream) const { return colours_[stream]; }

 private:
  struct Chunk {
    int stream;
    std::string bytes;
    size_t written = 0;
  };
  bool write_some();

  int files_[3];
  bool broken_[3] = {};
  bool terminal_[3] = {};
  bool colours_[3] = {};
  std::deque<Chunk> queue_;
  size_t queued_bytes_ = 0;
};

/// `line` without what would move a terminal's cursor or change its state:
/// colours stay, other control characters become '?'.
std::string safe_for_terminal(std::string_view line);

/// "[3] ", with a colour of its own for each rank if `colours`.
std::string rank_prefix(int rank, int world_size, bool colours);

}  // namespace echelon::launch
