// The ranks' output on its way to log files and the terminal: into the log as
// it is, onto the screen line by line. Nothing here blocks, and nothing grows
// without bound.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>

#include "echelon/launch/options.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::launch {

/// Splits one stream into lines. A carriage return starts the line again, as on
/// a terminal, so the last state of a progress bar remains.
class LineSplitter {
 public:
  using Sink = std::function<void(std::string_view line)>;
  using TimePoint = std::chrono::steady_clock::time_point;
  static constexpr size_t kMaxLine = 16 << 10;

  /// Calls `sink` for each whole line, without its newline. A line longer than
  /// kMaxLine comes in pieces.
  void feed(std::string_view bytes, TimePoint now, const Sink& sink);
  /// Gives the line that waits for its newline if nothing came for half a
  /// second (a prompt), or if a progress bar was redrawn for more than 5 s.
  void feed_idle(TimePoint now, const Sink& sink);
  /// Gives the line that waits for its newline, at the end of the stream.
  void finish(const Sink& sink);
  bool waiting() const { return !line_.empty(); }

 private:
  void emit(TimePoint now, const Sink& sink);

  std::string line_;
  bool after_return_ = false;
  TimePoint last_byte_{};
  TimePoint last_emitted_{};
};

/// The last bytes of a stream.
class Tail {
 public:
  static constexpr size_t kBytes = 16 << 10;
  void add(std::string_view bytes);
  std::string text() const;

 private:
  std::string bytes_;  // up to twice kBytes, so that truncating is rare
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
  /// Writes as much as the files take at once.
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

/// `line` without the sequences that move a terminal's cursor or change its
/// state: colours stay, other control characters become '?'.
std::string safe_for_terminal(std::string_view line);

/// "[3] ", in a different colour for each rank if `colours`.
std::string rank_prefix(int rank, int world_size, bool colours);

/// How a rank's streams reach the screen.
enum class Show {
  prefixed,  // lines, with a prefix
  plain,     // lines, unchanged
  raw,       // bytes, as they come
  direct,    // stdout is the launcher's own, stderr as `raw`
  hidden,
};

class RankOutput {
 public:
  using TimePoint = LineSplitter::TimePoint;

  /// Makes the pipes, and `log_path` unless empty. Throws ConfigError when the
  /// log cannot be written or no file is left.
  ///
  ///   append      whether an older log goes on
  ///   error_file  where the rank reports the error that ends it (empty: not
  ///               known); its text then goes to the log alone, since the
  ///               launcher's last words are that report
  RankOutput(
      Show show, const std::string& log_path, bool append = false,
      std::string error_file = {});

  void set_prefix(int stream, std::string prefix) {
    lanes_[stream].prefix = std::move(prefix);
  }

  /// The file that the rank writes to; -1 when it inherits the launcher's own.
  int write_end(int stream) const { return lanes_[stream].write_end.fd(); }
  void close_write_ends() {
    for (Lane& lane : lanes_) lane.write_end.close();
  }
  /// The file to poll; -1 once the stream has ended.
  int read_end(int stream) const { return lanes_[stream].read_end.fd(); }

  /// Reads the bytes that are there, at most 64 KiB. Returns false when there
  /// were none.
  bool read(int stream, TimePoint now, Screen& screen);
  /// Shows lines that have waited too long for their newline.
  void idle(TimePoint now, Screen& screen);
  bool waiting() const;
  /// Ends the output: the rank is gone, or its reader.
  void finish(Screen& screen);
  /// Makes the rank's next write to `stream` fail, as with a closed pipe.
  void close_stream(int stream) { lanes_[stream].read_end.close(); }

  std::string stderr_tail() const { return tail_.text(); }
  /// The error that ended the log early; 0 when it is complete.
  int log_error() const { return log_error_; }

 private:
  struct Lane {
    FileDescriptor read_end;
    FileDescriptor write_end;
    std::string prefix;
    LineSplitter splitter;
    std::string partial;  // Show::plain: the line that waits for its newline
    TimePoint last_byte{};
  };
  void show(int stream, std::string_view bytes, TimePoint now, Screen& screen);
  /// What comes before the text of the rank's report, until the next call.
  std::string_view before_report(std::string_view bytes, TimePoint now);
  void show_held(TimePoint now, Screen& screen);
  void log(std::string_view bytes);
  LineSplitter::Sink sink(int stream, Screen& screen);

  Show show_;
  std::string error_file_;
  bool reported_ = false;
  bool begins_line_ = true;  // the next bytes of stderr begin a line
  std::string read_;
  std::string held_;  // perhaps the begin of the report's text
  TimePoint held_since_{};
  Lane lanes_[3];
  Tail tail_;
  FileDescriptor log_;
  int log_error_ = 0;
};

}  // namespace echelon::launch
