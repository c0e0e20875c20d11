// The page is a sequence of sections. The head, the findings and the curves are
// here; the other sections have files of their own. A section without content
// adds nothing to the page, so that one function serves a finished run, a run
// that failed in its first step, and a simulation, which has times but no
// losses.
#include "echelon/report/report.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "echelon/error.h"
#include "echelon/report/chart.h"
#include "echelon/report/collectives.h"
#include "echelon/report/page.h"
#include "echelon/report/pipeline_page.h"
#include "echelon/report/sections.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/overlap.h"

namespace echelon::report {
namespace {

double total_seconds(const ReportInput& input) {
  if (input.total_seconds > 0) return input.total_seconds;
  double sum = 0;
  for (const auto& m : input.metrics) {
    if (std::isfinite(m.step_seconds)) sum += m.step_seconds;
  }
  return sum;
}

// A simulation learns nothing: it has only times.
bool is_simulated(const ReportInput& input) {
  if (input.timeline.simulated) return true;
  return !input.metrics.empty() && input.metrics.back().simulated;
}

std::optional<int64_t> first_not_finite(const ReportInput& input) {
  for (const auto& m : input.metrics) {
    if (!std::isfinite(m.loss)) return m.step;
  }
  return {};
}

// --- The head: title and headline figures ---------------------------------

// "12.5 ms" as value and unit.
Tile tile_of(
    const char* name, const std::string& text, const std::string& sub) {
  const size_t space = text.find(' ');
  if (space == std::string::npos || space != text.rfind(' ')) {
    return {name, text, sub, ""};
  }
  return {name, text.substr(0, space), sub, text.substr(space + 1)};
}

// What the strategy costs, as the last tile.
std::optional<Tile> cost_tile(
    const timeline::Diagnosis& d, const std::optional<StagePictures>& stages) {
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

bool has_tokens(const std::vector<timeline::StepMetrics>& metrics) {
  return !metrics.empty() && metrics[0].tokens_per_second;
}

// Tokens or samples per second.
std::function<double(const timeline::StepMetrics&)> rate_of(bool tokens) {
  if (!tokens) return &timeline::StepMetrics::samples_per_second;
  return [](const timeline::StepMetrics& m) {
    return m.tokens_per_second.value_or(NAN);
  };
}

Tile evaluation_tile(const timeline::EvaluationMetrics& last) {
  if (!last.accuracy && !last.perplexity) {
    return tile_of(
        "Held-out loss", format_number(last.loss),
        "of " + counted(last.samples, "sample"));
  }
  if (!last.perplexity) {
    return tile_of(
        "Held-out accuracy", format_percent(*last.accuracy),
        "of " + counted(last.samples, "sample"));
  }
  return tile_of(
      "Held-out perplexity", format_number(*last.perplexity),
      format_percent(last.accuracy.value_or(0)) + " of " +
          counted(last.tokens.value_or(0), "token") + " right");
}

std::vector<Tile> tiles_of(
    const ReportInput& input, const timeline::Diagnosis& d,
    const std::optional<StagePictures>& stages) {
  std::vector<Tile> tiles;
  if (!input.metrics.empty() && !is_simulated(input)) {
    const auto& last = input.metrics.back();
    tiles.push_back(tile_of(
        "Final loss", format_number(timeline::final_loss(input.metrics)),
        input.metrics.size() > 1
            ? format(
                  "mean of {} steps, to step {}",
                  std::min<size_t>(timeline::kFinalSteps, input.metrics.size()),
                  format_count(static_cast<double>(last.step)))
            : "of step " + format_count(static_cast<double>(last.step))));
  }
  if (!input.evaluations.empty()) {
    tiles.push_back(evaluation_tile(input.evaluations.back()));
  }
  if (!input.metrics.empty()) {
    const bool tokens = has_tokens(input.metrics);
    const auto rate = timeline::median_of(input.metrics, rate_of(tokens));
    tiles.push_back(tile_of(
        "Throughput", format_count(rate.value_or(0)),
        tokens ? "tokens/s, median" : "samples/s, median"));
  }
  if (const double seconds = total_seconds(input); seconds > 0) {
    tiles.push_back(tile_of(
        is_simulated(input) ? "Simulated time" : "Training time",
        format_seconds(seconds), counted(std::ssize(input.metrics), "step")));
  }
  if (auto tile = cost_tile(d, stages)) tiles.push_back(std::move(*tile));
  tiles.insert(tiles.end(), input.tiles.begin(), input.tiles.end());
  return tiles;
}

void draw_head(
    Markup& page, const ReportInput& input, const std::vector<Tile>& tiles) {
  page.add("<header>");
  draw_title(
      page, is_simulated(input) ? "simulated run" : "training run",
      input.title);
  if (!input.outcome.empty()) {
    page.add("<p class='outcome'>{}</p>", input.outcome);
  }
  draw_tiles(page, tiles);
  page.add("</header>");
}

// --- What held the run back -------------------------------------------------

void draw_finding(Markup& page, const ReportFinding& finding) {
  page.add("<li><h3>{}</h3><p>", finding.title);
  add_prose(page, finding.diagnosis);
  page.add("</p><p><b>Fix.</b> ");
  add_prose(page, finding.fix);
  page.add("</p>");
  if (!finding.settings.empty()) page.add("<pre>{}</pre>", finding.settings);
  page.add("<p><b>Why.</b> ");
  add_prose(page, finding.why);
  page.add("</p>");
  if (!finding.gain.empty()) {
    page.add("<p><b>Gain.</b> {}.</p>", unbroken(finding.gain));
  }
  page.add("</li>");
}

void draw_findings(Markup& page, const ReportInput& input) {
  if (!input.findings) return;
  const auto& [findings, largest_wait, notes] = *input.findings;
  page.add(
      "<section id='findings'><h2>What {} the run back</h2>",
      is_simulated(input) ? "would hold" : "held");
  if (findings.empty()) {
    page.add(
        "<p class='lead'>Nothing was found that {} it back.{}</p>",
        is_simulated(input) ? "would hold" : "held",
        largest_wait.empty() ? "" : " " + unbroken(largest_wait));
  } else {
    page.add("<ol class='findings'>");
    for (const auto& finding : findings) draw_finding(page, finding);
    page.add("</ol>");
  }
  for (const auto& note : notes) {
    page.add("<p class='note'>Note: ");
    add_prose(page, note);
    page.add(".</p>");
  }
  page.add("</section>");
}

// --- Curves ----------------------------------------------------------------

template <typename Metrics, typename Value>
std::vector<Point>
points_of(const std::vector<Metrics>& metrics, const Value& value) {
  std::vector<Point> points;
  points.reserve(metrics.size());
  for (const auto& m : metrics) {
    points.push_back({static_cast<double>(m.step), std::invoke(value, m)});
  }
  return points;
}

std::string range_text(const std::vector<Point>& points) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const auto& p : points) {
    if (!std::isfinite(p.y)) continue;
    low = std::min(low, p.y);
    high = std::max(high, p.y);
  }
  if (low > high) return "no finite value";
  return format(
      "from {} to {} over {}", format_number(low), format_number(high),
      counted(std::ssize(points), "point"));
}

Chart loss_chart(const ReportInput& input) {
  auto points = points_of(input.metrics, &timeline::StepMetrics::loss);
  Chart chart{
      .id = "loss",
      .title = "Loss",
      .description = "Training loss by step, " + range_text(points) + ".",
      .scale = YScale::automatic,
      .height = 240};
  chart.curves.push_back(
      {"training", "c1", CurveStyle::raw_and_smooth, std::move(points)});
  if (!input.evaluations.empty()) {
    chart.curves.push_back(
        {"held-out", "c2", CurveStyle::dots,
         points_of(input.evaluations, &timeline::EvaluationMetrics::loss)});
  }
  if (const auto step = first_not_finite(input)) {
    chart.headline = "not a finite number at step " + format_count(*step);
  }
  return chart;
}

Chart held_out_loss_chart(const ReportInput& input) {
  auto points = points_of(
      input.evaluations,
      [](const timeline::EvaluationMetrics& e) { return e.loss; });
  const std::string range = range_text(points);
  Chart chart{
      .id = "held-out-loss",
      .title = "Held-out loss",
      .headline = "last " + format_number(input.evaluations.back().loss),
      .description = "Loss on held-out samples, " + range + ".",
      .scale = YScale::automatic,
      .height = 240};
  chart.curves.push_back({chart.id, "c1", CurveStyle::dots, std::move(points)});
  return chart;
}

// What the evaluations measured: perplexity of texts, else accuracy, else the
// loss.
Chart evaluation_chart(const ReportInput& input) {
  if (!input.evaluations[0].perplexity && !input.evaluations[0].accuracy) {
    return held_out_loss_chart(input);
  }
  const auto& evaluations = input.evaluations;
  const bool texts = evaluations[0].perplexity.has_value();
  const auto value = [&](const timeline::EvaluationMetrics& e) {
    return (texts ? e.perplexity : e.accuracy).value_or(NAN);
  };
  const auto best =
      std::ranges::max_element(evaluations, [&](auto& a, auto& b) {
        return texts ? value(a) > value(b) : value(a) < value(b);
      });
  auto points = points_of(evaluations, value);
  Chart chart{
      .id = texts ? "perplexity" : "accuracy",
      .title = texts ? "Held-out perplexity" : "Held-out accuracy",
      .headline = format(
          "best {}, step {}",
          texts ? format_number(value(*best))
                : unbroken(format_percent(value(*best))),
          format_count(best->step)),
      .description =
          (texts ? "exp(loss) on held-out tokens: among how many tokens of the "
                   "vocabulary the model is undecided, "
                 : "Share of held-out samples that are right, ") +
          range_text(points) + ".",
      .scale = texts ? YScale::automatic : YScale::share,
      .height = 240};
  chart.curves.push_back({chart.id, "c1", CurveStyle::dots, std::move(points)});
  return chart;
}

void draw_small_charts(
    Markup& page, const std::vector<timeline::StepMetrics>& metrics) {
  using enum CurveStyle;
  const bool tokens = has_tokens(metrics);
  const struct {
    const char* id;
    const char* title;
    YScale scale;
    CurveStyle style;
    std::function<double(const timeline::StepMetrics&)> value;
  } charts[] = {
      {"throughput", tokens ? "Tokens per second" : "Samples per second",
       YScale::from_zero, raw_and_smooth, rate_of(tokens)},
      {"learning-rate", "Learning rate", YScale::from_zero, line,
       &timeline::StepMetrics::learning_rate},
      {"grad-norm", "Gradient norm", YScale::automatic, raw_and_smooth,
       [](const timeline::StepMetrics& m) {
         return m.grad_norm.value_or(NAN);
       }}};
  for (const auto& [id, title, scale, style, value] : charts) {
    auto points = points_of(metrics, value);
    Chart chart{
        .id = id,
        .title = title,
        .description = format("{} by step, {}.", title, range_text(points)),
        .scale = scale,
        .height = 130,
        .max_buckets = 240};
    chart.curves.push_back({"", "c1", style, std::move(points)});
    draw_chart(page, chart);
  }
}

void draw_curves(Markup& page, const ReportInput& input) {
  if (input.metrics.empty() && input.evaluations.empty()) return;
  if (is_simulated(input)) return;
  const bool evaluated = !input.evaluations.empty();
  page.add(
      "<section id='learning'><h2>Learning</h2><div class='{}'>",
      evaluated ? "grid2" : "grid2 only");
  draw_chart(page, loss_chart(input));
  if (evaluated) draw_chart(page, evaluation_chart(input));
  page.add("</div><div class='grid3'>");
  draw_small_charts(page, input.metrics);
  page.add(
      "</div><p class='note'>Horizontal axes count optimizer steps. The pale "
      "line is each step, or its range where steps are too many to draw; the "
      "strong line is the mean over a fifteenth of the run around it.</p>"
      "</section>");
}

}  // namespace

std::string to_html(const ReportInput& input) {
  const timeline::Diagnosis diagnosis = timeline::diagnose(input.timeline);
  const auto stages = stage_pictures(input.timeline, "pipeline");
  Markup page;
  draw_head(page, input, tiles_of(input, diagnosis, stages));
  draw_findings(page, input);
  draw_curves(page, input);
  draw_expert_section(page, input.metrics);
  if (stages) {
    page.add(
        "<section id='stages'><h2>{}</h2><p class='lead'>{}</p>",
        stages->heading, unbroken(stages->sentence));
    draw_stage_pictures(page, *stages);
    page.add("</section>");
  }
  draw_tensor_section(page, input.tensor, input.timeline, diagnosis);
  draw_time_section(page, input.timeline, diagnosis);
  draw_collectives(page, input.timeline, diagnosis);
  if (input.prediction) {
    draw_prediction(page, *input.prediction, input.timeline, diagnosis);
  }
  draw_memory_section(page, input.timeline, diagnosis);
  if (!input.facts.empty()) {
    page.add("<section id='configuration'><h2>Configuration</h2>");
    draw_facts(page, input.facts);
    page.add("</section>");
  }
  if (input.interim) {
    page.add(
        "<footer class='interim'>Written by Echelon before the end of the run, "
        "from what its folder has.</footer>");
  } else {
    page.add(
        "<footer>Written by Echelon from metrics.jsonl and timeline.json next "
        "to this file; ui.perfetto.dev opens the timeline with every span."
        "</footer>");
  }
  return page_of(
      input.title, std::move(page),
      stages ? PageScript::player : PageScript::none);
}

void write_report(const std::filesystem::path& path, const ReportInput& input) {
  write_file_atomically(path, to_html(input));
}

bool has_final_report(const std::filesystem::path& run) {
  std::error_code error;
  if (!std::filesystem::exists(run / "timeline.json", error)) return false;
  try {
    const std::string page = read_text_file(run / "report.html");
    return page.find("<footer class=\"interim\">") == page.npos;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace echelon::report
