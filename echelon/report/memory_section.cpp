// A step's samples become at most kMaxColumns columns, each with the fullest
// moment of its time, so that no peak is lost in a small picture. The kinds are
// stacked from what stays to what comes and goes.
#include "echelon/report/sections.h"

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

constexpr int kHeight = 200;         // of the plot, in pixels
constexpr double kPlotWidth = 1000;  // of the stretched drawing
constexpr size_t kMaxColumns = 240;  // of one picture

// The order of the areas, from the bottom up: what stays, then what comes and
// goes.
constexpr std::array<timeline::MemoryKind, 7> kOrder = {
    timeline::MemoryKind::parameters, timeline::MemoryKind::optimizer_state,
    timeline::MemoryKind::gradients,  timeline::MemoryKind::activations,
    timeline::MemoryKind::unsharded,  timeline::MemoryKind::communication,
    timeline::MemoryKind::working};

const char* css_of(timeline::MemoryKind kind) {
  constexpr std::array<const char*, 7> kClasses = {"mp", "mg", "mo", "ma",
                                                   "mu", "mc", "mw"};
  return kClasses[static_cast<size_t>(kind)];
}

struct Column {
  int64_t begin_ns = 0;
  timeline::MemoryByKind memory;  // the fullest moment of its time

  int64_t total() const { return memory.total(); }
};

struct MemoryPicture {
  const timeline::RankMemory* rank = nullptr;
  timeline::Interval window;
  std::vector<Column> columns;
  Column peak;

  int64_t peak_bytes() const { return peak.total(); }
};

// A typical step of the rank: the last recorded one that is not an outlier.
std::optional<timeline::Interval> step_of(
    const std::vector<timeline::StepActivity>& steps,
    const timeline::Diagnosis& diagnosis, int32_t rank) {
  std::optional<timeline::Interval> window;
  for (const auto& step : steps) {
    if (step.rank == rank && !diagnosis.outliers.contains(step.step)) {
      window = step.window;
    }
  }
  return window;
}

MemoryPicture
picture_of(const timeline::RankMemory& rank, const timeline::Interval& window) {
  MemoryPicture picture{.rank = &rank, .window = window};
  const int64_t length = std::max<int64_t>(1, window.end - window.begin);
  timeline::MemoryByKind now;  // as it is when the window begins
  size_t next = 0;
  const auto& samples = rank.samples;
  while (next < samples.size() && samples[next].time_ns <= window.begin) {
    now = samples[next++].memory;
  }
  picture.columns.push_back({window.begin, now});
  const auto column = [&](int64_t time) {
    return static_cast<size_t>(
        static_cast<double>(time - window.begin) / static_cast<double>(length) *
        static_cast<double>(kMaxColumns));
  };
  size_t last = 0;
  for (; next < samples.size() && samples[next].time_ns < window.end; ++next) {
    const Column here{samples[next].time_ns, samples[next].memory};
    const size_t at = column(here.begin_ns);
    if (at == last && picture.columns.size() > 1) {
      auto& fullest = picture.columns.back().memory;
      if (here.memory.total() > fullest.total()) fullest = here.memory;
      continue;
    }
    last = at;
    picture.columns.push_back(here);
  }
  picture.peak = *std::ranges::max_element(picture.columns, {}, &Column::total);
  return picture;
}

std::vector<MemoryPicture> pictures_of(
    const timeline::Timeline& timeline, const timeline::Diagnosis& diagnosis) {
  const auto steps = timeline::step_activities(timeline);
  std::vector<MemoryPicture> pictures;
  for (const auto& rank : timeline.memory) {
    if (rank.samples.empty()) continue;
    const timeline::Interval all = {
        rank.samples.front().time_ns, rank.samples.back().time_ns};
    pictures.push_back(
        picture_of(rank, step_of(steps, diagnosis, rank.rank).value_or(all)));
  }
  if (pictures.size() > kMemoryPictures) {
    std::ranges::stable_sort(
        pictures, std::greater(), &MemoryPicture::peak_bytes);
    pictures.resize(kMemoryPictures);
    std::ranges::sort(
        pictures, {}, [](const auto& picture) { return picture.rank->rank; });
  }
  return pictures;
}

// One scale for all ranks, so that they can be compared.
int64_t top_of(const std::vector<MemoryPicture>& pictures) {
  int64_t top = 1;
  int64_t limit = 0;
  for (const auto& picture : pictures) {
    top = std::max({top, picture.peak_bytes(), picture.rank->planned_bytes});
    limit = std::max(limit, picture.rank->limit_bytes);
  }
  // A limit far above would press the areas flat.
  if (limit > 0 && limit <= 2 * top) top = std::max(top, limit);
  return top + top / 16;
}

class MemoryDrawing {
 public:
  MemoryDrawing(Markup& page, const MemoryPicture& picture, int64_t top)
      : page_(page), picture_(picture), top_(top) {}

  void draw(const std::string& id) {
    const auto& rank = *picture_.rank;
    page_.add("<figure class='chart memory' id='{}'>", id);
    const auto name = format("Rank {}", rank.rank);
    page_.add("<figcaption>");
    draw_caption(page_, name, headline());
    page_.add("</figcaption><div class='plot'>");
    open_svg(
        page_, id, kHeight + 24, name + ": memory over a step", description());
    draw_axes();
    draw_areas();
    draw_line(rank.planned_bytes, "plan", "plan ");
    draw_line(rank.limit_bytes, "limit", "limit ");
    page_.add("</svg></div></figure>");
  }

 private:
  std::string headline() const {
    const auto& rank = *picture_.rank;
    const int64_t peak = picture_.peak_bytes();
    std::string text = "peak " + unbroken(format_bytes(peak));
    if (rank.planned_bytes > 0) {
      const double ratio =
          static_cast<double>(peak) / static_cast<double>(rank.planned_bytes);
      text += ", " + unbroken(format_percent(ratio)) + " of the plan\u2019s";
    }
    return text;
  }

  std::string description() const {
    std::string text = format(
        "At its fullest moment, {} after the step began, the rank held {}:",
        format_seconds(
            1e-9 * static_cast<double>(
                       picture_.peak.begin_ns - picture_.window.begin)),
        format_bytes(picture_.peak_bytes()));
    for (const timeline::MemoryKind kind : kOrder) {
      const int64_t bytes = picture_.peak.memory[kind];
      if (bytes <= 0) continue;
      text += " " + std::string(timeline::to_string(kind)) + " " +
              format_bytes(bytes) + ",";
    }
    text.back() = '.';
    return text;
  }

  double y_of(int64_t bytes) const {
    return kHeight *
           (1 - static_cast<double>(bytes) / static_cast<double>(top_));
  }
  double x_of(int64_t time) const {
    const auto length = static_cast<double>(
        std::max<int64_t>(1, picture_.window.end - picture_.window.begin));
    return kPlotWidth *
           std::clamp(
               static_cast<double>(time - picture_.window.begin) / length, 0.0,
               1.0);
  }

  void draw_axes() {
    int64_t unit = 1;
    while (top_ / unit >= 1024) unit *= 1024;
    for (const double tick : linear_ticks(
             0, static_cast<double>(top_) / static_cast<double>(unit), 4)) {
      const auto bytes = static_cast<int64_t>(tick * static_cast<double>(unit));
      draw_y_tick(page_, y_of(bytes), bytes == 0 ? "0" : format_bytes(bytes));
    }
    const double seconds =
        1e-9 * static_cast<double>(picture_.window.end - picture_.window.begin);
    const auto ticks = linear_ticks(0, seconds, 4);
    for (size_t i = 0; i < ticks.size(); ++i) {
      draw_tick(
          page_, i, ticks.size(), seconds > 0 ? ticks[i] / seconds : 0,
          kHeight + 18, ticks[i] == 0 ? "0" : format_seconds(ticks[i]));
    }
  }

  // The top of the stack up to each kind, as steps from left to right.
  void draw_areas() {
    page_.add(
        "<svg class='areas' width='100%' height='{}' viewBox='0 0 1000 {}' "
        "preserveAspectRatio='none'>",
        kHeight, kHeight);
    std::vector<int64_t> below(picture_.columns.size());
    for (const timeline::MemoryKind kind : kOrder) {
      std::vector<int64_t> above = below;
      bool any = false;
      for (size_t i = 0; i < above.size(); ++i) {
        above[i] += std::max<int64_t>(0, picture_.columns[i].memory[kind]);
        any |= above[i] != below[i];
      }
      if (any) {
        page_.add(
            "<path class='{}' d='{}{}Z'><title>{}</title></path>", css_of(kind),
            outline(above), reversed(below),
            std::string(timeline::to_string(kind)));
      }
      below = std::move(above);
    }
    page_.add("</svg>");
  }

  std::string outline(const std::vector<int64_t>& tops) const {
    std::string path;
    for (size_t i = 0; i < tops.size(); ++i) {
      const auto x = coordinate(x_of(picture_.columns[i].begin_ns), 1);
      const auto y = coordinate(y_of(tops[i]), 1);
      path += path.empty() ? "M" + x + " " + y : "H" + x + "V" + y;
    }
    return path + "H" + coordinate(kPlotWidth, 1);
  }
  std::string reversed(const std::vector<int64_t>& tops) const {
    std::string path;
    for (size_t i = tops.size(); i-- > 0;) {
      path += "V" + coordinate(y_of(tops[i]), 1) + "H" +
              coordinate(x_of(picture_.columns[i].begin_ns), 1);
    }
    return path;
  }

  void draw_line(int64_t bytes, const std::string& css, std::string name) {
    if (bytes <= 0 || bytes > top_) return;
    const double y = y_of(bytes);
    const auto at = coordinate(y);
    page_.add(
        "<line class='level {}' x1='0' x2='100%' y1='{}' y2='{}'/><text "
        "class='level-name {}' x='100%' y='{}' text-anchor='end'>{}</text>",
        css, at, at, css, y - 5, name + format_bytes(bytes));
  }

  Markup& page_;
  const MemoryPicture& picture_;
  int64_t top_;
};

void draw_legend(Markup& page, const std::vector<MemoryPicture>& pictures) {
  page.add("<p class='keys under'>");
  for (const timeline::MemoryKind kind : kOrder) {
    const bool any = std::ranges::any_of(pictures, [&](const auto& picture) {
      return std::ranges::any_of(picture.columns, [&](const Column& one) {
        return one.memory[kind] > 0;
      });
    });
    if (any)
      draw_key(page, css_of(kind), std::string(timeline::to_string(kind)));
  }
  page.add("</p>");
}

std::string sentence_of(const std::vector<MemoryPicture>& pictures) {
  const auto& fullest =
      *std::ranges::max_element(pictures, {}, &MemoryPicture::peak_bytes);
  const auto& memory = fullest.peak.memory;
  const auto kind = *std::ranges::max_element(
      kOrder, {}, [&](timeline::MemoryKind one) { return memory[one]; });
  const double share =
      static_cast<double>(memory[kind]) /
      static_cast<double>(std::max<int64_t>(1, memory.total()));
  return format(
      "Rank {} holds most: {}, of which {} is {}.", fullest.rank->rank,
      format_bytes(memory.total()), format_percent(share),
      timeline::to_string(kind));
}

}  // namespace

void draw_memory_section(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis) {
  const auto pictures = pictures_of(timeline, diagnosis);
  if (pictures.empty()) return;
  page.add(
      "<section id='memory'><h2>Memory over a step, by kind</h2><p "
      "class='lead'>{}</p>",
      unbroken(sentence_of(pictures)));
  draw_legend(page, pictures);
  page.add(
      "<div class='{}'>", pictures.size() > 1 ? "grid2 even" : "grid2 only");
  const int64_t top = top_of(pictures);
  for (const auto& picture : pictures) {
    MemoryDrawing(page, picture, top)
        .draw(format("memory-{}", picture.rank->rank));
  }
  page.add("</div>");
  std::string note =
      "Tensors, as the allocator reports them, in one typical step; what "
      "libraries allocate by themselves is not among them.";
  if (timeline.memory.size() > pictures.size()) {
    note += format(
        " Shown are the {} ranks of {} that hold most.", pictures.size(),
        format_count(timeline.memory.size()));
  }
  page.add("<p class='note'>{}</p></section>", note);
}

}  // namespace echelon::report
