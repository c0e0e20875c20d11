// Each finder looks for one kind of fault in the same evidence: the run's
// files, the times of its ranks, and a simulator that tries other settings. The
// findings are sorted by the share of the step that they cost. Then the run is
// compared with its prediction, which tells how far to trust simulated gains,
// and whether the machine as a whole was slow.
#include "echelon/explain/explain.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "echelon/explain/findings.h"
#include "echelon/predict/predict_run.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::explain {
namespace {

constexpr std::array<std::string_view, 10> kFaultNames = {
    "data loading",           "communication not overlapped",
    "bubble of the pipeline", "uneven stages",
    "uneven ranks",           "straggler",
    "memory near its limit",  "recompute that is not needed",
    "small batches",          "everything slower than predicted"};

// Measured over predicted: other work makes a machine a few times slower; more
// than that is another machine, or a simulator that knows too little of it.
constexpr double kLeastSlowdown = 2;
constexpr double kMostSlowdown = 8;

constexpr double kLeastTold = 0.005;  // the share of a step of what is told

std::vector<RunFinding> all_findings(const Evidence& evidence) {
  std::vector<RunFinding> all;
  for (const auto find :
       {find_data_loading, find_exposed_communication, find_pipeline_waits,
        find_uneven_ranks, find_memory, find_small_batch}) {
    auto some = find(evidence);
    all.insert(
        all.end(), std::make_move_iterator(some.begin()),
        std::make_move_iterator(some.end()));
  }
  std::ranges::stable_sort(all, std::greater<>(), &RunFinding::share);
  return all;
}

bool is_any_simulated(const std::vector<RunFinding>& findings) {
  return std::ranges::count(
             findings, GainSource::simulated, &RunFinding::gain_source) > 0;
}

// Metrics name the rank with most work in each step, but not how much more it
// has.
void note_slowest_rank(const RunRecord& run, std::vector<std::string>& notes) {
  std::map<int32_t, size_t> counts;
  size_t steps = 0;
  for (const auto& step : run.steps) {
    if (!step.slowest_rank) continue;
    ++counts[*step.slowest_rank];
    ++steps;
  }
  for (const auto& [rank, count] : counts) {
    if (steps < 8 || count * 5 < steps * 4) continue;
    notes.push_back(format(
        "rank {} had most work in {} of {} steps; a timeline would say by how "
        "much",
        rank, count, steps));
  }
}

void fill_from_timeline(
    const RunRecord& run, const RunTimes& times, RunExplanation& made) {
  made.recorded_steps = static_cast<int64_t>(times.steps.size());
  made.step_seconds = times.mean.step;
  made.ranks = static_cast<int64_t>(times.ranks.size());
  const RankTimes shares = shares_of(times.mean);
  made.compute_share = shares.compute();
  if (shares.idle >= 2 * kLeastShare) {
    made.notes.push_back(format(
        "of {} of the step nothing was recorded (work of the host, another "
        "program)",
        format_percent(shares.idle)));
  }
}

// Without a finding: the largest wait, with the shares of its causes. Each of
// them is too small for a finding, or nothing shortens it.
std::string largest_wait(const RankTimes& shares) {
  double exposed = shares.for_ranks;
  double most = shares.for_ranks;  // of one cause
  std::vector<std::string> causes, wheres;
  const auto add_cause = [&](double share, const std::string& where) {
    most = std::max(most, share);
    if (share < kLeastTold) return;
    causes.push_back(format_percent(share) + " " + where);
    wheres.push_back(where);
  };
  for (const auto& [axis, share] : shares.communication) {
    exposed += share;
    add_cause(
        share, axis.empty() ? "for figures of the step" : "along " + axis);
  }
  add_cause(shares.for_ranks, "for ranks that came later");
  const std::array<std::pair<const char*, double>, 4> waits = {{
      {"communication that nothing hides", exposed},
      {"the wait for data", shares.data},
      {"the wait for other stages of the pipeline", shares.for_stages},
      {"time in which nothing was recorded", shares.idle},
  }};
  const auto& [name, share] = *std::ranges::max_element(
      waits, {}, &std::pair<const char*, double>::second);
  if (share < kLeastTold) return "";
  std::string text = format(
      "The largest wait is {}, {} of the step", name, format_percent(share));
  const bool communicates = &share == &waits[0].second;
  if (communicates) {
    text +=
        causes.size() == 1 ? ", all " + wheres[0] : ": " + join(causes, ", ");
  }
  if ((communicates ? most : share) < kLeastWait) {
    return text + format(
                      ". Less than {} for one cause is no finding: a busy "
                      "machine may be behind it.",
                      format_percent(kLeastWait));
  }
  return text + ". No setting was found that shortens it.";
}

// Passes and the update, each much longer than predicted: not one part of the
// run is slow, the machine is.
void add_slow_machine(RunExplanation& made) {
  const double ratio = made.step_seconds / made.predicted_seconds;
  if (!(ratio >= kLeastSlowdown && ratio <= kMostSlowdown)) return;
  std::vector<std::string> texts;
  for (const auto& part : made.parts) {
    const bool computes = part.name == "forward" || part.name == "backward" ||
                          part.name == "optimizer";
    if (!computes || part.predicted < 0.02 * made.predicted_seconds) continue;
    if (part.measured < 0.8 * kLeastSlowdown * part.predicted) return;
    texts.push_back(
        format("{} {:.1f}", part.name, part.measured / part.predicted));
  }
  if (texts.empty()) return;
  RunFinding found{.fault = Fault::slow_machine, .share = 1 - 1 / ratio};
  found.reason.diagnosis = format(
      "A step takes {}, {:.1f} times the predicted {}, and all computing takes "
      "longer (times the prediction: {}).",
      format_seconds(made.step_seconds), ratio,
      format_seconds(made.predicted_seconds), join(texts, ", "));
  found.reason.fix = format(
      "Look for other work on the machine (`uptime`, `top`), and for lower "
      "clock rates. `echelon bench --save -n {}` measures the rates anew.",
      made.ranks);
  found.reason.why =
      "The prediction takes rates that were measured while nothing else ran. "
      "When every part takes longer, no single setting of the run is the "
      "cause.";
  made.findings.push_back(std::move(found));
  std::ranges::stable_sort(made.findings, std::greater<>(), &RunFinding::share);
}

void compare_with_prediction(
    const RunRecord& run, const WhatIf& what_if, RunExplanation& made) {
  const report::StepPrediction predicted =
      predict::predict_step(what_if.base()->configured, what_if.cluster());
  made.predicted_seconds = predicted.step_seconds;
  made.counted_layers = run.layers.has_value();
  const double ratio = made.step_seconds / made.predicted_seconds;
  if (is_any_simulated(made.findings) && (ratio > 1.5 || ratio < 1 / 1.5)) {
    made.notes.push_back(format(
        "the simulator is far from this run ({} a step): take its gains as "
        "rough",
        format_seconds(made.predicted_seconds)));
  }
  if (made.recorded_steps == 0) return;
  made.parts = timeline::compared_parts(
      predicted.parts,
      timeline::timed_parts(run.timeline, timeline::diagnose(run.timeline)));
  // Formulas and rates of a catalogue may be as far off.
  if (made.simulated || !made.counted_layers) return;
  add_slow_machine(made);
  if (made.findings.empty() && ratio >= kLeastSlowdown) {
    made.notes.push_back(format(
        "a step takes {:.1f} times the predicted {}, and nothing that was "
        "found explains it; look for other work on the machine (`uptime`)",
        ratio, format_seconds(made.predicted_seconds)));
  }
}

}  // namespace

std::string_view to_string(Fault fault) {
  return kFaultNames[static_cast<size_t>(fault)];
}

std::string title_of(const RunFinding& finding) {
  std::string title(to_string(finding.fault));
  if (!finding.axis.empty()) title += " (" + finding.axis + ")";
  if (finding.share > 0) {
    title += ", " + format_percent(finding.share) + " of the step";
  }
  return title;
}

std::string gain_text(const RunFinding& finding) {
  const std::string text = (finding.gain < 0 ? "costs " : "") +
                           format_percent(std::abs(finding.gain)) + " of ";
  switch (finding.gain_source) {
    case GainSource::none:
      return "";
    case GainSource::measured:
      return text + "the step, from the recorded times";
    case GainSource::replayed:
      return text +
             "the step, from the recorded passes in the schedule's order";
    default:
      return text + "a sample's time, by the simulator";
  }
}

report::ReportFindings findings_for_page(const RunExplanation& run) {
  report::ReportFindings page{
      .largest_wait = run.largest_wait, .notes = run.notes};
  for (const RunFinding& found : run.findings) {
    page.findings.push_back(
        {.title = title_of(found),
         .diagnosis = found.reason.diagnosis,
         .fix = found.reason.fix,
         .settings = to_tables(found.settings),
         .why = found.reason.why,
         .gain = gain_text(found)});
  }
  return page;
}

std::string to_text(const std::vector<std::string>& settings) {
  std::string text;
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    text += (text.empty() ? "" : ", ") + setting.substr(0, equals) + " = " +
            setting.substr(equals + 1);
  }
  return text;
}

std::string to_tables(const std::vector<std::string>& settings) {
  std::vector<std::pair<std::string, std::string>> tables;  // in their order
  for (const std::string& setting : settings) {
    const size_t dot = setting.find('.');
    const size_t equals = setting.find('=');
    if (dot == std::string::npos || equals == std::string::npos) continue;
    const std::string table = setting.substr(0, dot);
    const std::string line = setting.substr(dot + 1, equals - dot - 1) + " = " +
                             setting.substr(equals + 1) + "\n";
    const auto found = std::ranges::find(
        tables, table, &std::pair<std::string, std::string>::first);
    if (found == tables.end()) {
      tables.emplace_back(table, line);
    } else {
      found->second += line;
    }
  }
  std::string text;
  for (const auto& [name, lines] : tables) {
    text += (text.empty() ? "[" : "\n[") + name + "]\n" + lines;
  }
  return text;
}

void take_simulated_fix(
    const Evidence& evidence, const WhatIfStep& step, RunFinding& found) {
  found.settings = step.settings;
  found.gain = evidence.what_if.gain(step);
  found.gain_source = GainSource::simulated;
}

RunExplanation
explain_run(const std::filesystem::path& run, const ExplainOptions& options) {
  const RunRecord record = read_run(run);
  std::optional<Layout> layout;
  if (record.job) layout = record.job->layout;
  const RunTimes times = run_times(record.timeline, layout);
  const RankTimes shares = shares_of(times.mean);
  const WhatIf what_if(record, options.cluster, options.simulation_seconds);
  RunExplanation made;
  made.title = record.title;
  made.notes = record.notes;
  for (const auto& rollback : record.rollbacks) {
    made.notes.push_back("training " + timeline::to_text(rollback));
  }
  for (const auto& [of, what] :
       {std::pair(timeline::Divided::samples, "the batch was divided anew"),
        std::pair(timeline::Divided::layers, "stages were cut anew")}) {
    const auto count =
        std::ranges::count(record.rebalances, of, &timeline::Rebalance::of);
    if (count == 0) continue;
    const auto last = std::ranges::find(
        record.rebalances.rbegin(), record.rebalances.rend(), of,
        &timeline::Rebalance::of);
    made.notes.push_back(
        what +
        (count > 1 ? format(" {} times; the last time ", count)
                   : std::string(" ")) +
        timeline::to_text(*last));
  }
  made.simulated = record.simulated;
  if (layout) {
    made.layout = to_string(*layout);
    made.ranks = layout->num_ranks();
  }
  if (times.ranks.empty()) {
    const auto seconds = [](const timeline::StepMetrics& step) {
      return step.step_seconds;
    };
    made.step_seconds = timeline::median_of(record.steps, seconds).value_or(0);
    note_slowest_rank(record, made.notes);
  } else {
    fill_from_timeline(record, times, made);
  }
  made.findings = all_findings({record, times, shares, what_if});
  if (const int64_t some = what_if.num_left_out(); some > 0) {
    made.notes.push_back(format(
        "{} {} not simulated, which would have taken longer than {}; `echelon "
        "plan` searches",
        counted(some, "setting"), some == 1 ? "was" : "were",
        format_seconds(options.simulation_seconds)));
  }
  if (what_if.base()) {
    made.cluster = what_if.cluster().name;
    if (!what_if.is_guessed()) compare_with_prediction(record, what_if, made);
    if (what_if.is_guessed() && is_any_simulated(made.findings)) {
      made.notes.push_back(format(
          "fixes are simulated with rates that are guesses for this machine; "
          "`echelon bench --save -n {}` measures them",
          layout->num_ranks()));
    }
  } else if (record.job) {
    made.notes.push_back("no fix is simulated: " + what_if.why());
  }
  if (made.findings.empty() && made.recorded_steps > 0) {
    made.largest_wait = largest_wait(shares);
  }
  return made;
}

}  // namespace echelon::explain
