// On a terminal one line is redrawn in place; elsewhere lines are printed at
// intervals of steps. The line is a list of parts, each with an importance. The
// least important ones fall away until the rest fits, so that the line never
// wraps when it is drawn; its width is kept, to erase it after the window
// became narrower. The time of a step is a mean in which older steps fade by
// time, not by number, so that fast and slow steps settle alike.
#include "echelon/timeline/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/recorder.h"

namespace echelon::timeline {
namespace {

constexpr int64_t kRedrawNs = 100'000'000;
constexpr int kMinBar = 8;
constexpr int kMaxBar = 32;

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return format_number(value);
  return format("{:.{}f}", value, digits);
}

// Keeps its width from step to step, unlike format_number.
std::string loss_text(double loss) {
  const bool plain =
      !std::isfinite(loss) || (std::abs(loss) < 1e4 && std::abs(loss) >= 1e-3);
  return plain ? fixed(loss, 4) : format_number(loss);
}

// A closed terminal must not end the training.
void print(int file, std::string_view text) {
  write_all(file, text);
}

bool utf8_locale() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale = value;
    return locale.find("UTF-8") != locale.npos ||
           locale.find("utf8") != locale.npos;
  }
  return false;
}

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

int window_columns(int file) {
  winsize size{};
  if (::ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return size.ws_col;
  }
  return 80;
}

std::string repeat(std::string_view text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += text;
  return result;
}

}  // namespace

struct Progress::Part {
  std::string text;
  int importance;     // the least important part goes first
  const char* style;  // colour
};

ProgressOptions progress_options_for(int file) {
  ProgressOptions options;
  const char* term = std::getenv("TERM");
  const bool dumb =
      term == nullptr || std::string_view(term) == "dumb" || *term == '\0';
  options.terminal = ::isatty(file) == 1 && !dumb;
  options.color = options.terminal && !is_set("NO_COLOR");
  options.unicode = utf8_locale();
  options.columns = [file] { return window_columns(file); };
  options.write = [file](std::string_view text) { print(file, text); };
  return options;
}

Progress::Progress(int64_t total_steps, ProgressOptions options)
    : total_steps_(total_steps), options_(std::move(options)) {
  if (!options_.columns) options_.columns = [] { return 80; };
  if (!options_.now_ns) options_.now_ns = steady_now_ns;
  if (!options_.write) {
    options_.write = [](std::string_view text) { print(1, text); };
  }
  rate_ns_ = options_.now_ns();
}

Progress::~Progress() {
  if (drawn_ && !finished_) options_.write("\n");
}

void Progress::update(const ProgressState& state) {
  if (finished_) return;
  const int64_t now = options_.now_ns();
  update_rate(state.step, now);
  state_ = state;
  if (!options_.terminal) {
    const bool due = options_.every > 0 && state.step % options_.every == 0;
    if (due || state.step == total_steps_) {
      options_.write(plain_line());
      drawn_step_ = state.step;
    }
  } else if (!drawn_ || now - drawn_ns_ >= kRedrawNs) {
    drawn_ns_ = now;
    draw();
  }
  started_ = true;
}

void Progress::update_rate(int64_t step, int64_t now) {
  if (!started_) {
    // A resumed run starts at a later step; only the time since then counts.
    rate_step_ = step;
    rate_ns_ = now;
    return;
  }
  const int64_t steps = step - rate_step_;
  if (steps <= 0) return;
  const double recent = 1e-9 * static_cast<double>(now - rate_ns_) / steps;
  // Older steps fade: 5 % of a step's weight is left after a minute of them.
  const double weight =
      seconds_per_step_ == 0
          ? 1
          : 1 - std::exp(-1e-9 * static_cast<double>(now - rate_ns_) / 20);
  seconds_per_step_ += weight * (recent - seconds_per_step_);
  rate_step_ = step;
  rate_ns_ = now;
}

void Progress::message(std::string_view text) {
  std::string out;
  const bool redraw = drawn_ && !finished_;
  if (redraw) erase(out);
  out += text;
  if (out.empty() || out.back() != '\n') out += '\n';
  options_.write(out);
  if (redraw) {
    drawn_ = false;
    draw();
  }
}

void Progress::finish() {
  if (finished_) return;
  if (options_.terminal && started_) {
    draw();
    options_.write("\n");
  } else if (started_ && drawn_step_ != state_.step) {
    options_.write(plain_line());
  }
  finished_ = true;
}

// A window that became narrower wraps what was drawn for the wider one.
void Progress::erase(std::string& out) const {
  if (!drawn_) return;
  const int columns = std::max(1, options_.columns());
  const int rows_above = std::max(0, drawn_width_ - 1) / columns;
  if (rows_above > 0) out += format("\x1b[{}A", rows_above);
  out += rows_above > 0 ? "\r\x1b[J" : "\r\x1b[K";
}

void Progress::draw() {
  std::string out;
  erase(out);
  out += line(options_.columns() - 1, drawn_width_);
  options_.write(out);
  drawn_ = true;
  drawn_step_ = state_.step;
}

std::string Progress::eta() const {
  const bool known = total_steps_ > 0 && seconds_per_step_ > 0;
  if (!known || state_.step >= total_steps_) return "";
  const auto left = static_cast<double>(total_steps_ - state_.step);
  return format_clock(std::max(0.0, left * seconds_per_step_));
}

std::string Progress::rate() const {
  return state_.tokens_per_second > 0
             ? format_count(state_.tokens_per_second) + " tokens/s"
             : format_count(state_.samples_per_second) + " samples/s";
}

std::string Progress::slowest() const {
  if (state_.slowest_rank < 0) return "";
  return format(
      "slowest rank {} (+{} %)", state_.slowest_rank,
      std::lround(100 * state_.slowest_excess));
}

std::string Progress::scale() const {
  if (!(state_.loss_scale > 0)) return "";
  int exponent = 0;
  const bool power = std::frexp(state_.loss_scale, &exponent) == 0.5;
  std::string text = "scale " + (power ? format("2^{}", exponent - 1)
                                       : format_number(state_.loss_scale));
  if (state_.skipped_steps > 0) {
    text += format(" ({} skipped)", format_count(state_.skipped_steps));
  }
  return text;
}

std::string Progress::line(int columns, int& width) const {
  const bool known = total_steps_ > 0;
  std::vector<Part> parts = {
      {known ? format("{}/{}", state_.step, total_steps_)
             : counted(state_.step, "step"),
       9, "1"},
      {"epoch " + fixed(state_.epoch, 2), 3, "2"},
      {"loss " + loss_text(state_.loss), 8, "36"},
      {rate(), 5, ""}};
  if (const auto text = eta(); !text.empty()) {
    parts.push_back({"ETA " + text, 7, ""});
  }
  if (const auto text = slowest(); !text.empty()) {
    parts.push_back({text, 2, state_.slowest_excess > 0.1 ? "33" : "2"});
  }
  if (const auto text = scale(); !text.empty()) {
    const bool skips = state_.skipped_steps > 0;
    parts.push_back({text, skips ? 4 : 1, skips ? "33" : "2"});
  }
  const auto length = [&] {
    size_t sum = parts.empty() ? 0 : 2 * (parts.size() - 1);
    for (const auto& part : parts) sum += part.text.size();
    return static_cast<int>(sum);
  };
  // The bar has importance 6: it goes after the throughput, before the ETA.
  const auto least = [&] {
    return std::ranges::min_element(parts, {}, &Part::importance);
  };
  bool bar = known;
  while (!parts.empty() && length() + (bar ? kMinBar + 2 : 0) > columns) {
    if (bar && least()->importance > 6) {
      bar = false;
    } else {
      parts.erase(least());
    }
  }
  width = length();
  const auto styled = [&](const std::string& text, const std::string& style) {
    if (!options_.color || style.empty()) return text;
    return format("\x1b[{}m{}\x1b[0m", style, text);
  };
  std::string out;
  if (bar && !parts.empty()) {
    const int room = std::min(kMaxBar, columns - width - 2);
    const double share = std::clamp(
        static_cast<double>(state_.step) / static_cast<double>(total_steps_),
        0.0, 1.0);
    const int full = static_cast<int>(share * room);
    const auto done = repeat(options_.unicode ? "\u2501" : "#", full);
    const auto rest = repeat(options_.unicode ? "\u2500" : "-", room - full);
    out = styled(done, "32") + styled(rest, "2") + "  ";
    width += room + 2;
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    out += (i == 0 ? "" : "  ") + styled(parts[i].text, parts[i].style);
  }
  return out;
}

std::string Progress::plain_line() const {
  std::string out = format(
      "step {}{}  epoch {}  loss {}  {}", state_.step,
      total_steps_ > 0 ? format("/{}", total_steps_) : "",
      fixed(state_.epoch, 2), loss_text(state_.loss), rate());
  if (const auto text = eta(); !text.empty()) out += "  ETA " + text;
  for (const auto& text : {slowest(), scale()}) {
    if (!text.empty()) out += "  " + text;
  }
  return out + "\n";
}

}  // namespace echelon::timeline
