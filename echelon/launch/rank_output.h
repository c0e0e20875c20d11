// What one rank writes: into its log as it is, onto the screen line by line.
#pragma once

#include <string>
#include <string_view>

#include "echelon/launch/options.h"
#include "echelon/launch/output.h"

namespace echelon::launch {

/// How a rank's streams reach the screen.
enum class Show {
  prefixed,  // lines, with a prefix
  whole,     // lines, unchanged
  raw,       // bytes, as they come
  direct,    // stdout is the launcher's own, stderr as `raw`
  hidden,
};

class RankOutput {
 public:
  using TimePoint = LineCutter::TimePoint;

  /// Makes the pipes, and `log_path` unless empty. Throws ConfigError when the
  /// log cannot be written or no file is left.
  RankOutput(Show show, const std::string& log_path);
  ~RankOutput();
  RankOutput(RankOutput&&) noexcept;
  RankOutput& operator=(RankOutput&&) = delete;

  void set_prefix(int stream, std::string prefix) {
    lanes_[stream].prefix = std::move(prefix);
  }

  /// What the rank writes to; -1 when it inherits the launcher's own.
  int write_end(int stream) const { return lanes_[stream].write_end; }
  void close_write_ends();
  /// What to poll; -1 once the stream has ended.
  int read_end(int stream) const { return lanes_[stream].read_end; }

  /// Reads what is there, at most `max_bytes`. Returns false when there was
  /// nothing.
  bool
  read(int stream, TimePoint now, Screen& screen, size_t max_bytes = 64 << 10);
  /// Shows what waits for a newline too long.
  void idle(TimePoint now, Screen& screen);
  bool waiting() const;
  /// No more is to be read: the rank is gone, or its reader.
  void finish(Screen& screen);
  /// Lets the rank's next write to `stream` fail, as a closed pipe does.
  void close_stream(int stream);

  std::string stderr_tail() const { return tail_.text(); }
  /// The error that ended the log early; 0 when it is whole.
  int log_error() const { return log_error_; }

 private:
  struct Lane {
    int read_end = -1;
    int write_end = -1;
    std::string prefix;
    LineCutter cutter;
    std::string partial;  // Show::whole: what waits for its newline
    TimePoint last_byte{};
  };
  void show(int stream, std::string_view bytes, TimePoint now, Screen& screen);
  void log(std::string_view bytes);
  LineCutter::Sink sink(int stream, Screen& screen);
  void close_all();

  Show show_;
  Lane lanes_[3];
  Tail tail_;
  int log_ = -1;
  int log_error_ = 0;
};

}  // namespace echelon::launch
