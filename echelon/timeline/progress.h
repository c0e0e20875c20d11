// The progress of a run: one line on a terminal, plain lines elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace echelon::timeline {

struct ProgressState {
  int64_t step = 0;  // done so far
  double epoch = 0;
  double loss = 0;
  double samples_per_second = 0;
  double tokens_per_second = 0;  // language models: shown in place of samples
  int32_t slowest_rank = -1;     // shown when at least 0
  double slowest_excess = 0;     // its work over the mean, less 1: 0.14
  double loss_scale = 0;         // shown when above 0
  int64_t skipped_steps = 0;     // so far, for gradients that were not finite
};

/// What Progress depends on, so that tests are exact.
struct ProgressOptions {
  bool terminal = false;  // redraw one line; otherwise print lines
  bool color = false;
  bool unicode = false;
  int64_t every = 10;                           // steps between plain lines
  std::function<int()> columns;                 // default: always 80
  std::function<int64_t()> now_ns;              // default: steady_now_ns
  std::function<void(std::string_view)> write;  // default: standard output
};

/// The options for an open file such as 1: `terminal` if it is one and TERM is
/// not "dumb", colour unless NO_COLOR is set, unicode if the locale is UTF-8.
/// The window's width is looked up at each drawing.
ProgressOptions progress_options_for(int file);

/// On a terminal the line is redrawn at most ten times a second, never wider
/// than the window less one column; parts fall away, least important first,
/// when the window is narrow. Not thread-safe.
class Progress {
 public:
  /// `total_steps` <= 0: unknown, so no bar and no ETA.
  explicit Progress(int64_t total_steps, ProgressOptions options = {});
  /// Ends the line where it is, so that an error's text starts a new one.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(const ProgressState& state);
  /// Prints whole lines above the progress line.
  void message(std::string_view text);
  /// Draws the last state and ends the line. Further calls do nothing.
  void finish();

 private:
  struct Part;

  void draw();
  void erase(std::string& out) const;
  void update_rate(int64_t step, int64_t now);
  std::string line(int columns, int& width) const;
  std::string plain_line() const;
  std::string eta() const;
  std::string rate() const;
  std::string slowest() const;
  std::string scale() const;

  int64_t total_steps_;
  ProgressOptions options_;
  ProgressState state_;
  bool started_ = false;
  bool finished_ = false;
  bool drawn_ = false;   // a line is on the terminal, unfinished
  int drawn_width_ = 0;  // columns that it takes
  int64_t drawn_ns_ = 0;
  int64_t drawn_step_ = -1;  // of the last line, drawn or printed
  int64_t rate_step_ = 0;
  int64_t rate_ns_ = 0;
  double seconds_per_step_ = 0;  // smoothed; 0 until known
};

}  // namespace echelon::timeline
