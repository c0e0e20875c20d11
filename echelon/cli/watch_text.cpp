#include "echelon/cli/watch_text.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using watch::RankView;
using watch::RunState;
using watch::RunView;

constexpr size_t kName = 12;  // columns of the names on the left
constexpr size_t kChartRows = 5;
constexpr const char* kEighths[] = {" ", "▁", "▂", "▃", "▄",
                                    "▅", "▆", "▇", "█"};

// At most so many columns, without colours in it.
std::string cut(const std::string& text, size_t most) {
  if (columns(text) <= most) return text;
  std::string kept;
  size_t width = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins = (text[i] & 0xC0) != 0x80;
    if (begins && ++width >= most) break;
    kept += text[i];
  }
  return most == 0 ? "" : kept + "…";
}

std::string padded(const std::string& text, size_t width) {
  const size_t used = columns(text);
  return used < width ? text + std::string(width - used, ' ') : text;
}

std::string loss_of(const RunView& view) {
  if (!view.last || view.last->simulated) return "";
  const double loss = view.loss;
  const bool fixed =
      std::isfinite(loss) && std::abs(loss) < 1e4 && std::abs(loss) >= 1e-3;
  return fixed ? format("{:.4f}", loss) : format_number(loss);
}

std::string rate_of(const RunView& view) {
  if (!view.last) return "";
  return view.tokens_per_second > 0
             ? format_count(view.tokens_per_second) + " tokens/s"
             : format_count(view.samples_per_second) + " samples/s";
}

std::string steps_of(const RunView& view) {
  if (!view.last) return "no step yet";
  return view.total_steps > 0
             ? format("step {}/{}", view.last->step, view.total_steps)
             : format("step {}", view.last->step);
}

std::string memory_of(const RankView& rank) {
  const auto& status = rank.status;
  if (status.gpu_memory_used) {
    std::string text = format_bytes(*status.gpu_memory_used);
    if (status.gpu_memory_total) {
      text += " of " + format_bytes(*status.gpu_memory_total);
    }
    return text;
  }
  return status.resident_bytes ? format_bytes(*status.resident_bytes) : "";
}

// The points as at most so many means.
std::vector<double>
resampled(const std::vector<watch::CurvePoints::Point>& points, size_t width) {
  std::vector<double> means;
  if (points.empty() || width == 0) return means;
  const size_t count = std::min(width, points.size());
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * points.size() / count;
    const size_t end = std::max(begin + 1, (i + 1) * points.size() / count);
    double sum = 0;
    for (size_t j = begin; j < end; ++j) sum += points[j].y;
    means.push_back(sum / static_cast<double>(end - begin));
  }
  return means;
}

// A curve as bars of eighths of a line, from its least value up.
std::vector<std::string>
chart(const watch::CurvePoints& curve, size_t width, size_t rows) {
  constexpr size_t kLabel = 8;
  if (curve.points().size() < 2 || width < kLabel + 8) return {};
  const auto values = resampled(curve.points(), width - kLabel - 1);
  const auto [low, high] = std::ranges::minmax(values);
  const double range = high > low ? high - low : 1;
  std::vector<std::string> lines;
  for (size_t row = rows; row-- > 0;) {
    std::string label = row + 1 == rows ? format_number(high)
                        : row == 0      ? format_number(low)
                                        : "";
    label = std::string(kLabel - std::min(kLabel, columns(label)), ' ') + label;
    std::string line = label + " ";
    for (const double value : values) {
      const double eighths =
          1 + (value - low) / range * (8.0 * static_cast<double>(rows) - 1);
      const double here = eighths - 8.0 * static_cast<double>(row);
      line += kEighths[static_cast<size_t>(std::clamp(here, 0.0, 8.0))];
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

class Lines {
 public:
  Lines(const Style& style, size_t rows) : style_(style), rows_(rows) {}

  /// A line without colours.
  void add(const std::string& text) { push(cut(text, style_.columns)); }
  void bold(const std::string& text) {
    push(style_.bold(cut(text, style_.columns)));
  }
  void red(const std::string& text) {
    push(style_.red(cut(text, style_.columns)));
  }
  /// A name and its value, which may take more lines.
  void entry(const std::string& name, const std::string& text) {
    if (text.empty()) return;
    const std::string all = wrapped(text, kName, style_.columns);
    bool first = true;
    for (const auto& line : split(all)) {
      if (first) {
        push(
            style_.dim(padded(name, kName)) +
            cut(line, style_.columns - kName));
      } else {
        push(cut(line, style_.columns));
      }
      first = false;
    }
  }
  size_t left() const { return rows_ - std::min(rows_, lines_.size()); }
  std::vector<std::string> take() { return std::move(lines_); }

 private:
  void push(std::string line) {
    if (lines_.size() < rows_) lines_.push_back(std::move(line));
  }

  const Style& style_;
  size_t rows_;
  std::vector<std::string> lines_;
};

void add_ranks(Lines& lines, const RunView& view) {
  if (view.ranks.empty() || lines.left() < 3) return;
  // Those that need a look come first where not all fit.
  std::vector<const RankView*> shown;
  for (const auto& rank : view.ranks) shown.push_back(&rank);
  const size_t room = lines.left() - 2;
  if (shown.size() > room) {
    std::ranges::stable_sort(
        shown, std::greater(), [](const auto* rank) { return rank->in_doubt; });
    shown.resize(room > 1 ? room - 1 : 0);
    std::ranges::sort(
        shown, {}, [](const auto* rank) { return rank->status.rank; });
  }
  Rows rows = {{"rank", "state", "memory"}};
  const bool hosts = view.num_hosts > 1;
  const bool gpus = std::ranges::any_of(
      view.ranks, [](const auto& rank) { return rank.status.gpu.has_value(); });
  if (gpus) rows[0].insert(rows[0].end(), {"GPU", "busy"});
  if (hosts) rows[0].push_back("host");
  for (const auto* rank : shown) {
    const auto& status = rank->status;
    std::vector<std::string> row = {
        std::to_string(status.rank), plain(rank->state), memory_of(*rank)};
    if (gpus) {
      row.push_back(status.gpu ? std::to_string(*status.gpu) : "");
      row.push_back(status.gpu_busy ? format_percent(*status.gpu_busy) : "");
    }
    if (hosts) row.push_back(plain(rank->host));
    rows.push_back(std::move(row));
  }
  lines.add("");
  const auto table = split(aligned(rows));
  for (size_t i = 0; i < table.size(); ++i) {
    if (i == 0) {
      lines.bold(table[i]);
    } else if (shown[i - 1]->in_doubt) {
      lines.red(table[i]);
    } else {
      lines.add(table[i]);
    }
  }
  if (shown.size() < view.ranks.size()) {
    lines.add(format(
        "and {} more",
        counted(
            static_cast<int64_t>(view.ranks.size() - shown.size()), "rank")));
  }
}

std::string bar(const RunView& view, size_t width) {
  if (!view.last || view.total_steps <= 0 || width < 10) return "";
  const double share = std::clamp(
      static_cast<double>(view.last->step) /
          static_cast<double>(view.total_steps),
      0.0, 1.0);
  const auto full = static_cast<size_t>(share * static_cast<double>(width));
  std::string text;
  for (size_t i = 0; i < width; ++i) text += i < full ? "█" : "░";
  return text;
}

std::string speed_of(const RunView& view) {
  if (!view.last) return "";
  std::string text =
      rate_of(view) + ", " + format_seconds(view.step_seconds) + " a step";
  if (view.data_share >= 0.001) {
    text +=
        format(", {} of it waits for data", format_percent(view.data_share));
  }
  return text;
}

std::string mfu_of(const RunView& view) {
  if (!view.flops_per_second) return "";
  const std::string rate = watch::format_flops(*view.flops_per_second);
  if (!view.mfu) {
    return rate + "; the peak of these devices is not known";
  }
  return format_percent(*view.mfu) + ", " + rate;
}

std::string checkpoint_of(const RunView& view) {
  if (!view.checkpoint) return view.last ? "none yet" : "";
  return format(
      "step {}, {} ago", view.checkpoint->step,
      format_seconds(view.checkpoint->age_seconds));
}

}  // namespace

std::vector<std::string>
lines_of(const RunView& view, const Style& style, size_t rows) {
  Lines lines(style, rows);
  std::string heading = plain(view.name);
  if (!view.title.empty()) heading += "  " + plain(view.title);
  if (!view.layout.empty()) heading += ", " + plain(view.layout);
  lines.bold(heading);
  std::string state = std::string(watch::to_string(view.state));
  if (!view.why.empty()) state += ": " + plain(view.why);
  for (const auto& line : split(wrapped(state, 0, style.columns))) {
    is_bad(view.state) ? lines.red(line) : lines.add(line);
  }
  if (!view.note.empty()) lines.entry("note", plain(view.note));
  if (view.last) {
    std::string progress = steps_of(view);
    progress += format("  epoch {:.2f}", view.last->epoch);
    const std::string eta =
        view.eta_seconds ? "ETA " + format_clock(*view.eta_seconds) : "";
    const bool eta_fits =
        eta.empty() || columns(progress) + 2 + columns(eta) <= style.columns;
    if (!eta.empty() && eta_fits) progress += "  " + eta;
    const size_t used = columns(progress) + 2;
    if (style.columns > used + 10) {
      const auto drawn = bar(view, std::min<size_t>(32, style.columns - used));
      if (!drawn.empty()) progress += "  " + drawn;
    }
    lines.add(progress);
    if (!eta_fits) lines.add(eta);
    lines.add("");
    lines.entry("loss", loss_of(view));
    for (const auto& line : chart(
             view.losses, std::min<size_t>(style.columns, 100),
             lines.left() < 20 ? 3 : kChartRows)) {
      lines.add(line);
    }
    lines.entry("speed", speed_of(view));
    lines.entry("MFU", mfu_of(view));
    if (view.evaluation) {
      lines.entry(
          "evaluation", format(
                            "step {}: {}", view.evaluation->step,
                            timeline::to_text(*view.evaluation)));
    }
    lines.entry("checkpoint", checkpoint_of(view));
  }
  if (view.restarts > 0) {
    lines.entry("restarts", std::to_string(view.restarts));
  }
  if (!view.failure.empty()) lines.entry("failure", plain(view.failure));
  add_ranks(lines, view);
  if (!view.findings.empty() && lines.left() > 2) {
    lines.add("");
    lines.bold("held back by");
    for (const auto& finding : view.findings) {
      lines.add("  " + plain(finding));
    }
  }
  return lines.take();
}

std::string short_line(const RunView& view) {
  std::string text(watch::to_string(view.state));
  if (view.last) {
    text += "  " + steps_of(view);
    if (const auto loss = loss_of(view); !loss.empty())
      text += "  loss " + loss;
    text += "  " + rate_of(view);
    if (view.eta_seconds) text += "  ETA " + format_clock(*view.eta_seconds);
  }
  size_t doubtful = 0;
  for (const auto& rank : view.ranks) {
    if (!rank.in_doubt) continue;
    if (++doubtful > 3) break;
    text += format("  rank {}: {}", rank.status.rank, plain(rank.state));
  }
  if (!view.why.empty()) text += "  (" + plain(view.why) + ")";
  if (!view.failure.empty()) text += "  " + plain(view.failure);
  return text;
}

std::vector<std::string>
lines_of(const std::vector<RunView>& views, const Style& style, size_t rows) {
  Rows table = {{"run", "state", "step", "loss", "speed", "ETA", "wrote"}};
  for (const auto& view : views) {
    if (table.size() + 1 >= rows && table.size() < views.size()) break;
    const std::string steps =
        !view.last ? ""
        : view.total_steps > 0
            ? format("{}/{}", view.last->step, view.total_steps)
            : std::to_string(view.last->step);
    table.push_back(
        {plain(view.path), std::string(watch::to_string(view.state)), steps,
         loss_of(view), rate_of(view),
         view.eta_seconds ? format_clock(*view.eta_seconds) : "",
         view.quiet_seconds ? format_seconds(*view.quiet_seconds) + " ago"
                            : ""});
  }
  const size_t shown = table.size() - 1;
  // On narrow terminals the last columns fall away.
  std::vector<std::string> text = split(aligned(table));
  while (table[0].size() > 2 &&
         std::ranges::any_of(text, [&](const std::string& line) {
           return columns(line) > style.columns;
         })) {
    for (auto& row : table) row.pop_back();
    text = split(aligned(table));
  }
  Lines lines(style, rows);
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == 0) {
      lines.bold(text[i]);
    } else if (is_bad(views[i - 1].state)) {
      lines.red(text[i]);
    } else {
      lines.add(text[i]);
    }
  }
  if (shown < views.size()) {
    lines.add(format(
        "and {} more",
        counted(static_cast<int64_t>(views.size() - shown), "run")));
  }
  return lines.take();
}

}  // namespace echelon::cli
