// The load of each expert over time, as cells: a row for an expert, a column
// for a step whose loads the run wrote. Cells of one colour are one path, so
// that a large mixture stays a small page.
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/report/sections.h"
#include "echelon/text/units.h"
#include "echelon/timeline/expert_loads.h"

namespace echelon::report {
namespace {

constexpr size_t kMostRows = 64;
constexpr size_t kMostColumns = 100;
constexpr int kCellsHeight = 200;  // in pixels

// Loads over the mean of their layer.
struct LoadLevel {
  double below;
  const char* color;
  const char* name;
};
constexpr std::array<LoadLevel, 5> kLevels = {
    {{0.5, "idle", "under half of the mean"},
     {0.8, "fw", "half to 0.8"},
     {1.25, "bw", "0.8 to 1.25 times the mean"},
     {2, "mc", "1.25 to 2"},
     {1e300, "ex", "twice the mean or more"}}};

struct LayerOverTime {
  std::string layer;
  std::vector<int64_t> steps;
  std::vector<const timeline::ExpertLoads*> loads;  // by step

  // Of the last step that was written.
  double imbalance() const { return loads.back()->imbalance(); }
};

// Over all steps with loads, at most kMostColumns of them.
std::vector<LayerOverTime>
layers_of(const std::vector<timeline::StepMetrics>& metrics) {
  std::vector<const timeline::StepMetrics*> steps;
  for (const auto& step : metrics) {
    if (!step.expert_loads.empty()) steps.push_back(&step);
  }
  const size_t every = (steps.size() + kMostColumns - 1) / kMostColumns;
  std::vector<LayerOverTime> layers;
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < steps.size(); ++i) {
    if ((steps.size() - 1 - i) % every != 0) continue;
    for (const auto& loads : steps[i]->expert_loads) {
      if (loads.chosen.empty()) continue;
      const auto [place, is_new] = places.emplace(loads.layer, layers.size());
      if (is_new) layers.push_back({.layer = loads.layer});
      layers[place->second].steps.push_back(steps[i]->step);
      layers[place->second].loads.push_back(&loads);
    }
  }
  return layers;
}

class CellDrawing {
 public:
  CellDrawing(Markup& page, const LayerOverTime& layer)
      : page_(page), layer_(layer) {
    for (const auto* loads : layer.loads) {
      experts_ = std::max(experts_, loads->chosen.size());
    }
    per_row_ = (experts_ + kMostRows - 1) / kMostRows;
    rows_ = (experts_ + per_row_ - 1) / per_row_;
  }

  void draw(const std::string& id) {
    page_.add("<figure class='chart' id='{}'><figcaption>", id);
    draw_caption(
        page_, layer_.layer,
        format(
            "{} times the mean at step {}", format_number(layer_.imbalance()),
            format_count(layer_.steps.back())));
    page_.add("</figcaption><div class='plot'>");
    open_svg(
        page_, id, kCellsHeight + 24, "Load of experts, " + layer_.layer,
        description());
    draw_ticks();
    page_.add(
        "<svg width='100%' height='{}' viewBox='0 0 {} {}' "
        "preserveAspectRatio='none'>",
        kCellsHeight, layer_.loads.size(), rows_);
    for (size_t level = 0; level < kLevels.size(); ++level) draw_level(level);
    page_.add("</svg></svg></div></figure>");
  }

 private:
  std::string description() const {
    const auto& chosen = layer_.loads.back()->chosen;
    const auto most = std::ranges::max_element(chosen);
    return format(
        "Each row is {}, each column a step. At the last one, expert {} had "
        "the most tokens: {} of {}.",
        per_row_ == 1 ? std::string("an expert")
                      : format("the fullest of {} experts", per_row_),
        most - chosen.begin(), format_count(*most),
        format_count(layer_.loads.back()->total()));
  }

  size_t level_of(size_t column, size_t row) const {
    const auto& loads = *layer_.loads[column];
    int64_t most = 0;
    for (size_t i = row * per_row_; i < (row + 1) * per_row_; ++i) {
      if (i < loads.chosen.size()) most = std::max(most, loads.chosen[i]);
    }
    const int64_t total = std::max<int64_t>(1, loads.total());
    const double over_mean =
        static_cast<double>(most * std::ssize(loads.chosen)) /
        static_cast<double>(total);
    size_t level = 0;
    while (level + 1 < kLevels.size() && over_mean >= kLevels[level].below) {
      ++level;
    }
    return level;
  }

  // Cells of one colour, those side by side as one.
  void draw_level(size_t level) {
    std::string path;
    for (size_t row = 0; row < rows_; ++row) {
      for (size_t begin = 0; begin < layer_.loads.size(); ++begin) {
        size_t end = begin;
        while (end < layer_.loads.size() && level_of(end, row) == level) ++end;
        if (end == begin) continue;
        path += format("M{} {}H{}V{}H{}Z", begin, row, end, row + 1, begin);
        begin = end;
      }
    }
    if (path.empty()) return;
    page_.add(
        "<path class='{}' d='{}'><title>{}</title></path>",
        kLevels[level].color, path, kLevels[level].name);
  }

  void draw_ticks() {
    const auto last = static_cast<double>(rows_ * per_row_ - 1);
    for (const double expert : whole_ticks(0, last, 4)) {
      draw_y_tick(
          page_,
          kCellsHeight * (expert / static_cast<double>(per_row_) + 0.5) /
              static_cast<double>(rows_),
          format_count(expert));
    }
    const size_t columns = layer_.steps.size();
    const size_t count = std::min<size_t>(columns, 5);
    for (size_t i = 0; i < count; ++i) {
      const size_t column = count == 1 ? 0 : i * (columns - 1) / (count - 1);
      draw_tick(
          page_, i, count,
          (static_cast<double>(column) + 0.5) / static_cast<double>(columns),
          kCellsHeight + 18, format_count(layer_.steps[column]));
    }
  }

  Markup& page_;
  const LayerOverTime& layer_;
  size_t experts_ = 1, per_row_ = 1, rows_ = 1;
};

void draw_curve_of(
    Markup& page, const std::vector<timeline::StepMetrics>& metrics,
    Chart chart, double factor,
    std::optional<double> timeline::StepMetrics::*value) {
  std::vector<Point> points;
  for (const auto& step : metrics) {
    if (!(step.*value)) continue;
    points.push_back({static_cast<double>(step.step), factor * *(step.*value)});
  }
  if (points.empty()) return;
  chart.scale = YScale::from_zero;
  chart.height = 160;
  chart.description = format(
      "{} by step, {} at the end.", chart.title,
      format_number(points.back().y));
  chart.headline = format_number(points.back().y) + " at the end";
  chart.curves.push_back(
      {"", "c1", CurveStyle::raw_and_smooth, std::move(points)});
  draw_chart(page, chart);
}

std::string drop_sentence(const std::vector<timeline::StepMetrics>& metrics) {
  double sum = 0;
  int64_t steps = 0;
  const std::vector<timeline::ExpertLoads>* last = nullptr;
  for (const auto& step : metrics) {
    if (!step.dropped_share) continue;
    sum += *step.dropped_share;
    ++steps;
    if (timeline::dropped_share(step.expert_loads) > 0)
      last = &step.expert_loads;
  }
  if (steps == 0) return "";
  std::string text = format(
      " The capacity dropped {} of the choices, on average over the steps",
      format_percent(sum / static_cast<double>(steps)));
  if (last != nullptr) {
    text += "; last it dropped most of " + timeline::most_dropped(*last);
  }
  return text + ".";
}

}  // namespace

void draw_expert_section(
    Markup& page, const std::vector<timeline::StepMetrics>& metrics) {
  auto layers = layers_of(metrics);
  const bool any = std::ranges::any_of(metrics, [](const auto& step) {
    return step.expert_imbalance.has_value();
  });
  if (!any) return;
  page.add("<section id='experts'><h2>Load of the experts</h2>");
  std::ranges::stable_sort(layers, std::greater(), &LayerOverTime::imbalance);
  const size_t shown = std::min(layers.size(), kExpertPictures);
  if (shown > 0) {
    const auto& worst = layers.front();
    const auto& chosen = worst.loads.back()->chosen;
    page.add(
        "<p class='lead'>{}</p>",
        unbroken(format(
            "At step {}, expert {} of {} had {} times the mean load of its "
            "layer, the most of all.{}",
            format_count(worst.steps.back()),
            std::ranges::max_element(chosen) - chosen.begin(), worst.layer,
            format_number(worst.imbalance()), drop_sentence(metrics))));
  }
  page.add("<div class='grid2'>");
  draw_curve_of(
      page, metrics,
      {.id = "expert-imbalance", .title = "Largest load over the mean"}, 1,
      &timeline::StepMetrics::expert_imbalance);
  draw_curve_of(
      page, metrics,
      {.id = "dropped-share", .title = "Dropped choices, per cent"}, 100,
      &timeline::StepMetrics::dropped_share);
  page.add("</div>");
  if (shown > 0) {
    page.add("<p class='keys under'>");
    for (const auto& level : kLevels) draw_key(page, level.color, level.name);
    page.add("</p><div class='{}'>", shown > 1 ? "grid2 even" : "grid2 only");
    for (size_t i = 0; i < shown; ++i) {
      CellDrawing(page, layers[i]).draw(format("experts-{}", i));
    }
    page.add("</div>");
  }
  page.add(
      "<p class='note'>A row is an expert, a column a step. Tokens of all "
      "ranks "
      "are counted, each for every expert that it chose.{}</p></section>",
      layers.size() > shown
          ? format(
                " Shown are the {} layers of {} with the largest loads over "
                "the mean.",
                shown, layers.size())
          : "");
}

}  // namespace echelon::report
