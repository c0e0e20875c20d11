// Each run becomes a Run: its input and what is derived from it before anything
// is drawn. The strategy's name comes from the layout. Without one it comes
// from the axes that the timeline's collectives name, so that a timeline alone
// is enough. The sections compare the runs by the same measures: medians of
// rates and steps, the fullest rank at its fullest moment, the mean of the
// recorded steps. A section that no run has figures for is left out.
#include "echelon/report/strategy_page.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/report/pipeline_page.h"
#include "echelon/report/sections.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/timeline/overlap.h"

namespace echelon::report {
namespace {

struct Strategy {
  std::string title;
  std::string paragraph;  // how it works
};

const Strategy kPlacement = {
    "Model parallel",
    "The layers are spread over several devices of one process. A batch passes "
    "the devices one after another, and its gradients come back the same way: "
    "each device holds a part of the model only."};
const Strategy kOneDevice = {
    "One device",
    "One device computes the whole batch: what the others equal."};

// A run, and what is computed of it before it is drawn.
struct Run {
  const StrategyRun& input;
  timeline::Diagnosis diagnosis = {};
  std::optional<StagePictures> stages = {};
  Strategy strategy = {};
};

bool has_replicas(const StagePictures& stages) {
  return std::ranges::any_of(stages.pictures.back().rows, [](const auto& row) {
    return row.group > 0;
  });
}

// The axes along which ranks share work: those of the layout, or those of the
// collectives.
std::set<Axis> axes_of(const Run& run) {
  std::set<Axis> axes;
  if (run.input.layout) {
    for (const Axis axis : run.input.layout->used_axes()) axes.insert(axis);
    return axes;
  }
  for (const Axis axis : kAxes) {
    const std::string name(to_string(axis));
    const bool used = std::ranges::any_of(
        run.input.timeline.spans,
        [&](const timeline::Span& span) { return span.axis == name; });
    if (used) axes.insert(axis);
  }
  if (run.stages) {
    axes.insert(Axis::pp);
    // Ranks that share a stage are replicas, unless they share its layers.
    const bool replicas = !axes.contains(Axis::tp) &&
                          !axes.contains(Axis::dp_shard) &&
                          has_replicas(*run.stages);
    if (replicas) axes.insert(Axis::dp_replicate);
  }
  // Several ranks whose collectives name no axis are taken for replicas.
  if (axes.empty() && run.input.timeline.rank_names.size() > 1) {
    axes.insert(Axis::dp_replicate);
  }
  return axes;
}

std::string sharded_state(int64_t zero_stage) {
  return zero_stage == 1 ? "the optimizer's state is"
         : zero_stage == 2
             ? "gradients and the optimizer's state are"
             : "parameters, gradients and the optimizer's state are";
}

// A title of its axes: "Pipeline, tensor and data parallel".
std::string title_of(const std::set<Axis>& axes) {
  const bool sharded = axes.contains(Axis::dp_shard);
  const bool replicated = axes.contains(Axis::dp_replicate);
  std::vector<std::string> words;
  if (axes.contains(Axis::pp)) words.emplace_back("pipeline");
  if (axes.contains(Axis::cp)) words.emplace_back("context");
  if (axes.contains(Axis::ep)) words.emplace_back("expert");
  if (axes.contains(Axis::tp)) words.emplace_back("tensor");
  if (sharded)
    words.emplace_back(replicated ? "hybrid sharded data" : "sharded data");
  if (replicated && !sharded) words.emplace_back("data");
  std::string title = words.front();
  for (size_t i = 1; i < words.size(); ++i) {
    title += (i + 1 < words.size() ? ", " : " and ") + words[i];
  }
  title.front() = static_cast<char>(title.front() - 'a' + 'A');
  return title + " parallel";
}

std::string paragraph_of(const std::set<Axis>& axes, int64_t zero_stage) {
  std::vector<std::string> sentences;
  const auto add = [&](Axis axis, std::string sentence) {
    if (axes.contains(axis)) sentences.push_back(std::move(sentence));
  };
  add(Axis::pp,
      "The model is partitioned into stages, and the batch is split into "
      "microbatches. They follow one another through the stages, so that the "
      "devices work side by side; the gradients come back the same way.");
  add(Axis::cp,
      "Each sequence is sharded over ranks, which exchange keys and values.");
  add(Axis::ep,
      "The experts of a layer are spread over ranks, and each token is sent to "
      "those of its experts.");
  add(Axis::tp,
      "The matrices of each layer are sharded over ranks, which compute the "
      "same samples together. Where a layer needs all features, the parts are "
      "summed.");
  add(Axis::dp_shard,
      "Each rank computes a share of the batch, and " +
          sharded_state(zero_stage) + " sharded over the ranks." +
          (zero_stage >= 3 ? " The parameters of a layer are all-gathered "
                             "before it runs."
                           : "") +
          " Gradients are averaged while backward computes the next ones.");
  if (axes.size() == 1) {
    add(Axis::dp_replicate,
        "Each rank holds the whole model and computes a share of the batch. "
        "The gradients are averaged over the ranks, bucket by bucket, while "
        "backward computes the next ones.");
  } else {
    add(Axis::dp_replicate,
        "Several replicas of this share the batch and average their "
        "gradients.");
  }
  return join(sentences, " ");
}

Strategy strategy_of(const Run& run) {
  // Pictures of stages without a pipeline's actions are those of one process
  // that drives several devices.
  const bool placed =
      run.stages && !timeline::typical_pipeline_step(run.input.timeline);
  if (placed) return kPlacement;
  const auto axes = axes_of(run);
  if (axes.empty()) return kOneDevice;
  return {title_of(axes), paragraph_of(axes, run.input.zero_stage)};
}

Run run_of(const StrategyRun& input, size_t number) {
  Run run{input};
  run.diagnosis = timeline::diagnose(input.timeline);
  run.stages = stage_pictures(input.timeline, format("run-{}", number));
  run.strategy = strategy_of(run);
  return run;
}

std::string name_of(const Run& run) {
  return run.input.name.empty() ? run.strategy.title : run.input.name;
}

// "Sharded data parallel, fsdp=2".
std::string strategy_text(const Run& run) {
  if (!run.input.layout || run.input.layout->num_ranks() == 1) {
    return run.strategy.title;
  }
  return run.strategy.title + ", " + to_string(*run.input.layout);
}

// The share of a typical step in which nothing is computed; below 0: not known.
double share_not_computing(const Run& run) {
  if (run.stages) return run.stages->idle;
  const auto& mean = run.diagnosis.mean;
  if (!(mean.step_seconds > 0)) return -1;
  return 1 - mean.compute_seconds / mean.step_seconds;
}

bool counts_tokens(const Run& run) {
  const auto& metrics = run.input.metrics;
  return !metrics.empty() && metrics[0].tokens_per_second;
}

void draw_cells(Markup& page, const Run& run, bool tokens, bool samples) {
  const auto& metrics = run.input.metrics;
  const auto& evaluations = run.input.evaluations;
  const auto cell = [&](bool known, const auto& text) {
    page.add("<td>{}</td>", known ? text() : "\u2013");
  };
  const auto rate_cell = [&](const auto& of_step) {
    const auto rate = timeline::median_of(metrics, of_step);
    cell(rate.has_value(), [&] { return format_count(*rate); });
  };
  cell(!metrics.empty() && !metrics.back().simulated, [&] {
    return format_number(timeline::final_loss(metrics));
  });
  cell(!evaluations.empty() && evaluations.back().accuracy, [&] {
    return format_percent(*evaluations.back().accuracy);
  });
  if (tokens) {
    cell(!evaluations.empty() && evaluations.back().perplexity, [&] {
      return format_number(*evaluations.back().perplexity);
    });
  }
  if (samples) {
    rate_cell(
        [](const timeline::StepMetrics& m) { return m.samples_per_second; });
  }
  if (tokens) {
    rate_cell([](const timeline::StepMetrics& m) {
      return m.tokens_per_second.value_or(NAN);
    });
  }
  const auto seconds = timeline::median_of(
      metrics, [](const timeline::StepMetrics& m) { return m.step_seconds; });
  cell(seconds && *seconds > 0, [&] { return format_seconds(*seconds); });
  const double share = share_not_computing(run);
  cell(share >= 0, [&] { return format_percent(share); });
}

void draw_table(Markup& page, const std::vector<Run>& runs) {
  const bool tokens = std::ranges::any_of(runs, counts_tokens);
  const bool samples = !std::ranges::all_of(runs, counts_tokens);
  std::vector<std::string> heads = {
      "Run", "Strategy", "Final loss", "Held-out accuracy"};
  if (tokens) heads.push_back("Perplexity");
  if (samples) heads.push_back("Samples/s");
  if (tokens) heads.push_back("Tokens/s");
  heads.push_back("Step");
  heads.push_back("Not computing");
  page.add("<div id='runs'>");
  open_table(page, "The runs in figures", heads);
  for (size_t i = 0; i < runs.size(); ++i) {
    page.add(
        "<tr><th scope='row'><a href='#strategy-{}'>{}</a></th><td>{}</td>", i,
        name_of(runs[i]), strategy_text(runs[i]));
    draw_cells(page, runs[i], tokens, samples);
    page.add("</tr>");
  }
  close_table(page);
  page.add("<p class='note'>Rates and steps are medians.</p></div>");
}

// --- Memory and communication -----------------------------------------------

// The fullest rank at its fullest moment; none: not measured.
std::optional<timeline::MemoryByKind> most_memory(const Run& run) {
  std::optional<timeline::MemoryByKind> most;
  for (const auto& rank : run.input.timeline.memory) {
    for (const auto& sample : rank.samples) {
      if (!most || sample.memory.total() > most->total()) most = sample.memory;
    }
  }
  return most;
}

// The bytes of the collectives and messages of a rank in a recorded step: the
// most of all ranks, in the mean of the steps.
double bytes_a_step(const Run& run) {
  std::map<int32_t, double> bytes;
  std::set<int64_t> steps;
  for (const auto& span : run.input.timeline.spans) {
    if (span.step < 0) continue;
    steps.insert(span.step);
    if (span.kind != timeline::SpanKind::communication) continue;
    bytes[span.rank] += static_cast<double>(span.bytes);
  }
  double most = 0;
  for (const auto& [_, one] : bytes) most = std::max(most, one);
  return steps.empty() ? 0 : most / static_cast<double>(steps.size());
}

// A table of what each strategy shards, and what that costs.
void draw_shares(Markup& page, const std::vector<Run>& runs) {
  using timeline::MemoryKind;
  const bool measured = std::ranges::any_of(
      runs, [](const Run& run) { return most_memory(run).has_value(); });
  if (!measured) return;
  page.add(
      "<section id='shares'><h2>What a rank held and sent</h2>"
      "<p class='lead'>The memory of the fullest rank at its fullest moment, "
      "and what a rank gave to collectives and messages in a step.</p>");
  open_table(
      page, "Memory and communication of a rank",
      {"Run", "All memory", "Parameters", "Gradients", "Optimizer state",
       "Activations", "Other", "Sent in a step"});
  for (const auto& run : runs) {
    page.add("<tr><th scope='row'>{}</th>", name_of(run));
    const auto cell = [&](int64_t bytes) {
      page.add("<td>{}</td>", bytes > 0 ? format_bytes(bytes) : "\u2013");
    };
    const auto most = most_memory(run).value_or(timeline::MemoryByKind{});
    int64_t other = most.total();
    cell(other);
    for (const MemoryKind kind :
         {MemoryKind::parameters, MemoryKind::gradients,
          MemoryKind::optimizer_state, MemoryKind::activations}) {
      cell(most[kind]);
      other -= most[kind];
    }
    cell(other);
    cell(static_cast<int64_t>(bytes_a_step(run)));
    page.add("</tr>");
  }
  close_table(page);
  page.add("</section>");
}

// --- Loss curves ------------------------------------------------------------

constexpr size_t kCurveColors = 8;  // c1 … of assets/report.css

bool has_loss(const timeline::StepMetrics& step) {
  return !step.simulated && std::isfinite(step.loss);
}

// The step at which the losses of the runs are the furthest apart.
struct LossDifference {
  size_t steps = 0;  // that two runs or more have
  int64_t step = 0;
  double difference = 0;
  size_t lowest = 0;  // indices of runs
  size_t highest = 0;
};

LossDifference largest_difference(const std::vector<Run>& runs) {
  struct Range {
    double low = 0;
    double high = 0;
    size_t lowest = 0;
    size_t highest = 0;
    size_t count = 0;
  };
  std::map<int64_t, Range> ranges;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const auto& step : runs[i].input.metrics) {
      if (!has_loss(step)) continue;
      Range& range = ranges[step.step];
      if (range.count == 0 || step.loss < range.low) {
        range.low = step.loss;
        range.lowest = i;
      }
      if (range.count == 0 || step.loss > range.high) {
        range.high = step.loss;
        range.highest = i;
      }
      ++range.count;
    }
  }
  LossDifference found;
  for (const auto& [step, range] : ranges) {
    if (range.count < 2) continue;
    ++found.steps;
    if (found.steps > 1 && range.high - range.low <= found.difference) continue;
    found.step = step;
    found.difference = range.high - range.low;
    found.lowest = range.lowest;
    found.highest = range.highest;
  }
  return found;
}

std::string
difference_text(const std::vector<Run>& runs, const LossDifference& found) {
  if (found.steps == 0) return "No two runs have a step in common.";
  if (found.difference == 0) {
    return format(
        "The losses are equal in {}.",
        found.steps == 1
            ? "the one step that runs share"
            : "all " + counted(static_cast<int64_t>(found.steps), "step") +
                  " that runs share");
  }
  return format(
      "The losses differ by at most {} (step {}: {} is higher than {}), over "
      "{} that runs share.",
      format_number(found.difference), format_count(found.step),
      name_of(runs[found.highest]), name_of(runs[found.lowest]),
      counted(static_cast<int64_t>(found.steps), "step"));
}

void draw_losses(Markup& page, const std::vector<Run>& runs) {
  Chart chart{
      .id = "losses",
      .title = "Training loss",
      .scale = YScale::automatic,
      .height = 260};
  for (const Run& run : runs) {
    Curve curve{
        .name = name_of(run),
        .color = format("c{}", chart.curves.size() % kCurveColors + 1),
        .style = CurveStyle::raw_and_smooth};
    for (const auto& step : run.input.metrics) {
      if (!has_loss(step)) continue;
      curve.points.push_back({static_cast<double>(step.step), step.loss});
    }
    if (!curve.points.empty()) chart.curves.push_back(std::move(curve));
  }
  if (chart.curves.empty()) return;
  const std::string text =
      chart.curves.size() < 2 ? ""
                              : difference_text(runs, largest_difference(runs));
  chart.description = "Training loss by step, a curve for each run. " + text;
  page.add("<section id='loss'><h2>Loss</h2>");
  if (!text.empty()) page.add("<p class='lead'>{}</p>", text);
  page.add("<div class='grid2 only'>");
  draw_chart(page, chart);
  page.add(
      "</div><p class='note'>The horizontal axis counts optimizer steps. The "
      "pale lines are the losses of steps, the strong ones their mean over a "
      "fifteenth of the run. Where curves coincide, the thinner ones of later "
      "runs are over the wider ones.</p>"
      "</section>");
}

// --- Configurations ---------------------------------------------------------

constexpr const char* kUnknown = "\u2013";

// By key, in the order of the configuration: the values of the runs.
std::vector<std::pair<std::string, std::vector<std::string>>>
different_settings(const std::vector<Run>& runs) {
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  std::map<std::string, size_t> row_of;
  std::vector<bool> known(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    known[i] = !runs[i].input.settings.empty();
    for (const auto& [key, value] : runs[i].input.settings) {
      const auto [found, added] = row_of.try_emplace(key, rows.size());
      if (added) {
        rows.emplace_back(key, std::vector<std::string>(runs.size(), kUnknown));
      }
      rows[found->second].second[i] = value;
    }
  }
  // A run whose configuration is not known must not make every key differ.
  std::erase_if(rows, [&](const auto& row) {
    std::set<std::string> values;
    for (size_t i = 0; i < runs.size(); ++i) {
      if (known[i]) values.insert(row.second[i]);
    }
    return values.size() < 2;
  });
  return rows;
}

void draw_settings(Markup& page, const std::vector<Run>& runs) {
  const auto known = std::ranges::count_if(
      runs, [](const Run& run) { return !run.input.settings.empty(); });
  if (known < 2) return;
  page.add(
      "<section id='settings'><h2>What differs in the configurations</h2>");
  const auto rows = different_settings(runs);
  if (rows.empty()) {
    page.add("<p class='lead'>Nothing but the runs' folders.</p></section>");
    return;
  }
  std::vector<std::string> heads = {"Setting"};
  for (const Run& run : runs) heads.push_back(name_of(run));
  open_table(page, "Settings that differ", heads);
  for (const auto& [key, values] : rows) {
    page.add("<tr><th scope='row'>{}</th>", key);
    for (const auto& value : values) page.add("<td>{}</td>", value);
    page.add("</tr>");
  }
  close_table(page);
  page.add("</section>");
}

void draw_verified(Markup& page, const std::vector<VerifiedLayout>& verified) {
  if (verified.empty()) return;
  page.add(
      "<section id='verified'><h2>Equal to one device</h2><p class='lead'>"
      "<code>echelon verify</code> ran each layout in float64 and compared "
      "losses, gradients and parameters with those of one device, by "
      "name.</p>");
  open_table(
      page, "Layouts compared with one device",
      {"Layout", "Result", "Steps", "Comparisons", "Largest difference"});
  for (const auto& one : verified) {
    page.add(
        "<tr><th scope='row'>{}</th><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td></tr>",
        one.layout, one.passed ? "equal" : "different", format_count(one.steps),
        format_count(one.num_compared), format("{:.1e}", one.largest));
  }
  close_table(page);
  page.add("<p class='note'>Differences are relative.</p></section>");
}

void draw_planned(Markup& page, const std::vector<PlannedLayout>& planned) {
  if (planned.empty()) return;
  page.add(
      "<section id='planned'><h2>On other devices</h2><p class='lead'>"
      "<code>echelon plan</code> predicts the fastest layout of a model on a "
      "cluster that need not be here.</p>");
  open_table(
      page, "Predicted layouts",
      {"Model", "Cluster", "Layout", "Step", "MFU", "Memory of a device"});
  for (const auto& plan : planned) {
    page.add(
        "<tr><th scope='row'>{}</th><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{}</td></tr>",
        plan.model, plan.cluster, plan.layout,
        format_seconds(plan.step_seconds), format_percent(plan.mfu),
        format_bytes(plan.peak_bytes));
  }
  close_table(page);
  page.add("</section>");
}

void draw_run(Markup& page, const Run& run, size_t number) {
  const auto id = format("strategy-{}", number);
  page.add("<section id='{}'><h2>{}</h2>", id, name_of(run));
  if (!run.input.name.empty()) {
    page.add("<h3>{}</h3>", strategy_text(run));
  }
  page.add("<p class='lead'>{}</p>", run.strategy.paragraph);
  for (const auto& note : run.input.notes) {
    page.add("<p class='note'>Note: ");
    add_prose(page, note);
    page.add(".</p>");
  }
  if (run.stages) {
    page.add("<p class='finding'>{}</p>", unbroken(run.stages->sentence));
    draw_stage_pictures(page, *run.stages);
  } else if (!run.diagnosis.sentence.empty()) {
    page.add("<p class='finding'>{}</p>", unbroken(run.diagnosis.sentence));
    draw_typical_step(page, run.input.timeline, run.diagnosis, id + "-");
  }
  if (!run.input.link.empty()) {
    page.add(
        "<p class='note'><a href='{}'>The report of this run</a>, {} from "
        "where "
        "this page was written.</p>",
        run.input.link, run.input.link);
  }
  page.add("</section>");
}

}  // namespace

std::string to_html(const StrategyPage& input) {
  std::vector<Run> runs;
  for (const auto& run : input.runs) runs.push_back(run_of(run, runs.size()));
  const bool plays = std::ranges::any_of(
      runs, [](const Run& run) { return run.stages.has_value(); });
  Markup page;
  page.add("<header>");
  draw_title(page, "runs compared", input.title);
  page.add("</header>");
  if (!runs.empty()) draw_table(page, runs);
  draw_losses(page, runs);
  draw_shares(page, runs);
  draw_verified(page, input.verified);
  draw_settings(page, runs);
  for (size_t i = 0; i < runs.size(); ++i) draw_run(page, runs[i], i);
  draw_planned(page, input.planned);
  page.add(
      "<footer>Written by Echelon from the timeline.json, metrics.jsonl "
      "and config.toml of each run.</footer>");
  return page_of(
      input.title, std::move(page),
      plays ? PageScript::player : PageScript::none);
}

void write_strategy_page(
    const std::filesystem::path& path, const StrategyPage& page) {
  write_file_atomically(path, to_html(page));
}

}  // namespace echelon::report
