#include "echelon/report/report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "echelon/report/chart.h"
#include "echelon/report/collectives.h"
#include "echelon/report/markup.h"
#include "echelon/report/memory_section.h"
#include "echelon/report/page.h"
#include "echelon/report/pipeline_section.h"
#include "echelon/report/report_time.h"
#include "echelon/report/tensor_section.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/overlap.h"

namespace echelon {
namespace {

double total_seconds(const ReportInput& input) {
  if (input.total_seconds > 0) return input.total_seconds;
  double sum = 0;
  for (const auto& m : input.metrics) {
    if (std::isfinite(m.step_seconds)) sum += m.step_seconds;
  }
  return sum;
}

std::vector<double> finite_values(
    const std::vector<StepMetrics>& metrics,
    const std::function<double(const StepMetrics&)>& value) {
  std::vector<double> values;
  for (const auto& m : metrics) {
    if (std::isfinite(value(m))) values.push_back(value(m));
  }
  return values;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// A simulation learns nothing: it has times alone.
bool is_simulated(const ReportInput& input) {
  if (input.timeline.simulated) return true;
  return !input.metrics.empty() && input.metrics.back().simulated;
}

std::optional<int64_t> first_not_finite(const ReportInput& input) {
  for (const auto& m : input.metrics) {
    if (!std::isfinite(m.loss)) return m.step;
  }
  return std::nullopt;
}

// --- The head: title and headline figures ---------------------------------

struct Tile {
  std::string name;
  std::string value;
  std::string unit;
  std::string sub;
};

// "12.5 ms" as value and unit.
Tile tile_of(std::string name, const std::string& text, std::string sub) {
  const size_t space = text.find(' ');
  const bool compound = space != std::string::npos &&
                        text.find(' ', space + 1) != std::string::npos;
  if (space == std::string::npos || compound) {
    return {std::move(name), text, "", std::move(sub)};
  }
  return {
      std::move(name), text.substr(0, space), text.substr(space + 1),
      std::move(sub)};
}

// What the strategy costs, as the last tile.
std::optional<Tile>
cost_tile(const Diagnosis& d, const std::optional<StagePictures>& stages) {
  if (stages && stages->ideal_idle) {
    return tile_of(
        "Pipeline bubble", format_percent(stages->idle),
        "ideal " + format_percent(*stages->ideal_idle));
  }
  if (stages) {
    return tile_of(
        "Devices idle", format_percent(stages->idle), "of a typical step");
  }
  if (d.mean.communication_seconds > 0) {
    return tile_of(
        "Exposed communication",
        format_percent(d.mean.exposed_seconds / d.mean.step_seconds),
        "of the step");
  }
  if (d.mean.step_seconds > 0) {
    return tile_of(
        "Computing",
        format_percent(d.mean.compute_seconds / d.mean.step_seconds),
        "of the step");
  }
  return {};
}

bool of_texts(const ReportInput& input) {
  return !input.metrics.empty() && input.metrics[0].tokens_per_second;
}

std::function<double(const StepMetrics&)> rate_of(bool texts) {
  if (!texts) return &StepMetrics::samples_per_second;
  return [](const StepMetrics& m) { return m.tokens_per_second.value_or(NAN); };
}

Tile evaluation_tile(const EvaluationMetrics& last) {
  if (!last.perplexity) {
    return tile_of(
        "Held-out accuracy", format_percent(last.accuracy),
        "of " + format_count(last.samples) + " samples");
  }
  return tile_of(
      "Held-out perplexity", format_number(*last.perplexity),
      format_percent(last.accuracy) + " of " +
          format_count(last.tokens.value_or(0)) + " tokens right");
}

std::vector<Tile> tiles_of(
    const ReportInput& input, const Diagnosis& d,
    const std::optional<StagePictures>& stages) {
  std::vector<Tile> tiles;
  if (!input.metrics.empty() && !is_simulated(input)) {
    const auto& last = input.metrics.back();
    tiles.push_back(tile_of(
        "Final loss", format_number(last.loss),
        "after step " + format_count(last.step)));
  }
  if (!input.evaluations.empty()) {
    tiles.push_back(evaluation_tile(input.evaluations.back()));
  }
  if (!input.metrics.empty()) {
    const bool texts = of_texts(input);
    const double rate = median(finite_values(input.metrics, rate_of(texts)));
    tiles.push_back(tile_of(
        "Throughput", format_count(rate),
        texts ? "tokens/s, median" : "samples/s, median"));
  }
  if (const double seconds = total_seconds(input); seconds > 0) {
    tiles.push_back(tile_of(
        is_simulated(input) ? "Simulated time" : "Training time",
        format_seconds(seconds),
        format_count(static_cast<double>(input.metrics.size())) + " steps"));
  }
  if (auto tile = cost_tile(d, stages)) tiles.push_back(std::move(*tile));
  return tiles;
}

void draw_head(
    Markup& page, const ReportInput& input, const std::vector<Tile>& tiles) {
  page.open("header");
  page.leaf(
      "p", {{"class", "eyebrow"}},
      is_simulated(input) ? "Echelon \u00b7 simulated run"
                          : "Echelon \u00b7 training run");
  page.leaf("h1", {}, input.title);
  if (!input.outcome.empty()) {
    page.leaf("p", {{"class", "outcome"}}, input.outcome);
  }
  if (!tiles.empty()) {
    page.open("dl", {{"class", "tiles"}});
    for (const auto& tile : tiles) {
      page.open("div", {{"class", "tile"}}).leaf("dt", {}, tile.name);
      page.open("dd", {{"class", "value"}}).text(tile.value);
      if (!tile.unit.empty()) page.leaf("small", {}, "\u00a0" + tile.unit);
      page.close().leaf("dd", {{"class", "sub"}}, tile.sub).close();
    }
    page.close();
  }
  page.close();
}

// --- Curves ----------------------------------------------------------------

std::vector<Point> points_of(
    const std::vector<StepMetrics>& metrics,
    const std::function<double(const StepMetrics&)>& value) {
  std::vector<Point> points;
  points.reserve(metrics.size());
  for (const auto& m : metrics) {
    points.push_back({static_cast<double>(m.step), value(m)});
  }
  return points;
}

std::vector<Point> points_of(
    const std::vector<EvaluationMetrics>& evaluations,
    const std::function<double(const EvaluationMetrics&)>& value) {
  std::vector<Point> points;
  for (const auto& e : evaluations) {
    points.push_back({static_cast<double>(e.step), value(e)});
  }
  return points;
}

std::string range_text(const std::vector<Point>& points) {
  double low = 0;
  double high = 0;
  bool any = false;
  for (const auto& p : points) {
    if (!std::isfinite(p.y)) continue;
    low = any ? std::min(low, p.y) : p.y;
    high = any ? std::max(high, p.y) : p.y;
    any = true;
  }
  if (!any) return "no finite value";
  return "from " + format_number(low) + " to " + format_number(high) +
         " over " + format_count(static_cast<double>(points.size())) +
         " points";
}

Chart loss_chart(const ReportInput& input) {
  Chart chart{.id = "loss", .title = "Loss"};
  chart.scale = YScale::automatic;
  chart.height = 240;
  auto points = points_of(input.metrics, [](const auto& m) { return m.loss; });
  chart.description = "Training loss by step, " + range_text(points) + ".";
  chart.curves.push_back(
      {"training", "c1", CurveStyle::raw_and_smooth, std::move(points)});
  if (!input.evaluations.empty()) {
    chart.curves.push_back(
        {"held-out", "c2", CurveStyle::dots,
         points_of(input.evaluations, &EvaluationMetrics::loss)});
  }
  if (const auto step = first_not_finite(input)) {
    chart.headline = "not a finite number at step " + format_count(*step);
  }
  return chart;
}

Chart accuracy_chart(const ReportInput& input) {
  Chart chart{.id = "accuracy", .title = "Held-out accuracy"};
  chart.scale = YScale::share;
  chart.height = 240;
  const auto best = std::max_element(
      input.evaluations.begin(), input.evaluations.end(),
      [](const auto& a, const auto& b) { return a.accuracy < b.accuracy; });
  chart.headline = "best " + unbroken(format_percent(best->accuracy)) +
                   ", step " + format_count(best->step);
  auto points = points_of(input.evaluations, &EvaluationMetrics::accuracy);
  chart.description =
      "Share of held-out samples that are right, " + range_text(points) + ".";
  chart.curves.push_back(
      {"accuracy", "c1", CurveStyle::dots, std::move(points)});
  return chart;
}

Chart small_chart(
    const ReportInput& input, std::string id, std::string title, YScale scale,
    CurveStyle style, const std::function<double(const StepMetrics&)>& value) {
  Chart chart{.id = std::move(id), .title = std::move(title)};
  chart.scale = scale;
  chart.height = 130;
  chart.max_buckets = 240;
  auto points = points_of(input.metrics, value);
  chart.description = chart.title + " by step, " + range_text(points) + ".";
  chart.curves.push_back({"", "c1", style, std::move(points)});
  return chart;
}

Chart perplexity_chart(const ReportInput& input) {
  Chart chart{.id = "perplexity", .title = "Held-out perplexity"};
  chart.scale = YScale::automatic;
  chart.height = 240;
  const auto value = [](const EvaluationMetrics& e) {
    return e.perplexity.value_or(NAN);
  };
  const auto best = std::min_element(
      input.evaluations.begin(), input.evaluations.end(),
      [&](const auto& a, const auto& b) { return value(a) < value(b); });
  chart.headline = "best " + format_number(value(*best)) + ", step " +
                   format_count(best->step);
  auto points = points_of(input.evaluations, value);
  chart.description =
      "exp(loss) on held-out tokens: among how many words the model is "
      "undecided, " +
      range_text(points) + ".";
  chart.curves.push_back(
      {"perplexity", "c1", CurveStyle::dots, std::move(points)});
  return chart;
}

void draw_curves(Markup& page, const ReportInput& input) {
  if (input.metrics.empty() && input.evaluations.empty()) return;
  if (is_simulated(input)) return;
  page.open("section").leaf("h2", {}, "Learning");
  const bool evaluated = !input.evaluations.empty();
  page.open("div", {{"class", evaluated ? "grid2" : "grid2 only"}});
  draw_chart(page, loss_chart(input));
  if (evaluated) {
    draw_chart(
        page, input.evaluations[0].perplexity ? perplexity_chart(input)
                                              : accuracy_chart(input));
  }
  page.close();
  page.open("div", {{"class", "grid3"}});
  using M = StepMetrics;
  const bool texts = of_texts(input);
  auto throughput = small_chart(
      input, "throughput", texts ? "Tokens per second" : "Samples per second",
      YScale::from_zero, CurveStyle::raw_and_smooth, rate_of(texts));
  draw_chart(page, throughput);
  draw_chart(
      page, small_chart(
                input, "learning-rate", "Learning rate", YScale::from_zero,
                CurveStyle::line, [](const M& m) { return m.learning_rate; }));
  draw_chart(
      page, small_chart(
                input, "grad-norm", "Gradient norm", YScale::automatic,
                CurveStyle::raw_and_smooth,
                [](const M& m) { return m.grad_norm.value_or(NAN); }));
  page.close();
  page.leaf(
      "p", {{"class", "note"}},
      "Horizontal axes count optimizer steps. The pale line is each step, or "
      "its range where steps are too many to draw; the strong line is "
      "the mean over a fifteenth of the run around it.");
  page.close();
}

// --- Facts and the page ----------------------------------------------------

void draw_facts(Markup& page, const ReportInput& input) {
  if (input.facts.empty()) return;
  page.open("section").leaf("h2", {}, "Configuration");
  page.open("dl", {{"class", "facts"}});
  for (const auto& [name, value] : input.facts) {
    page.open("div").leaf("dt", {}, name).leaf("dd", {}, value).close();
  }
  page.close().close();
}

}  // namespace

std::string to_html(const ReportInput& input) {
  const Diagnosis diagnosis = diagnose(input.timeline);
  const auto stages =
      stage_pictures(input.timeline, input.ideal_pipeline, "pipeline");
  const PageScript script = stages ? PageScript::player : PageScript::none;
  Markup page;
  open_page(page, input.title, script);
  draw_head(page, input, tiles_of(input, diagnosis, stages));
  draw_curves(page, input);
  if (stages) {
    page.open("section").leaf("h2", {}, stages->heading);
    page.leaf("p", {{"class", "lead"}}, unbroken(stages->sentence));
    draw_stage_pictures(page, *stages);
    page.close();
  }
  draw_tensor_section(page, input.tensor, input.timeline, diagnosis);
  draw_time_section(page, input.timeline, diagnosis);
  draw_collectives(page, input.timeline, diagnosis);
  if (input.prediction) {
    draw_prediction(page, *input.prediction, input.timeline, diagnosis);
  }
  draw_memory_section(page, input.timeline, diagnosis);
  draw_facts(page, input);
  page.leaf(
      "footer", {},
      "Written by Echelon from metrics.jsonl and timeline.json beside this "
      "file; ui.perfetto.dev opens the timeline with every span.");
  return finish_page(std::move(page), script);
}

void write_report(const std::filesystem::path& path, const ReportInput& input) {
  write_text_file(path, to_html(input));
}

}  // namespace echelon
