#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "echelon/cli/simulate.h"
#include "echelon/cli/terminal.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

const Device&
fullest_device(const SimulateCase& what, const StepEstimate& step) {
  const auto pipelines = static_cast<int64_t>(step.memory.ranks.size());
  const int64_t ranks = what.strategy.layout.num_ranks();
  return what.cluster
      .node_of(ranks / std::max<int64_t>(1, pipelines) * step.memory.fullest())
      .device;
}

bool is_text(const SimulateCase& what) {
  return what.model.transformer.has_value();
}

// The parts of a step that took time, with their names.
std::vector<std::pair<std::string, double>>
named_parts(const StepParts& parts) {
  std::vector<std::pair<std::string, double>> list = {
      {"matmuls, attention", parts.matrix},
      {"memory-bound operators", parts.memory},
      {"recompute", parts.recompute}};
  for (const Axis axis : kAxes) {
    list.emplace_back(
        "waiting for " + std::string(to_string(axis)),
        parts.exposed[static_cast<size_t>(axis)]);
  }
  list.emplace_back("pipeline bubble", parts.bubble);
  list.emplace_back("optimizer", parts.optimizer);
  list.emplace_back("other", parts.other);
  std::erase_if(list, [](const auto& part) { return part.second <= 0; });
  return list;
}

Rows figures(const SimulateCase& what, const SimulateResult& result) {
  const StepEstimate& step = result.run.step;
  const double ranks = static_cast<double>(what.strategy.layout.num_ranks());
  const double each = step.tokens_per_second / ranks;
  const Device& device = fullest_device(what, step);
  const double usable = usable_bytes(device);
  const double peak = step.memory.peak_bytes();
  Rows rows = {
      {"step", format_seconds(step.step_seconds)},
      {is_text(what) ? "tokens/s" : "samples/s",
       format(
           "{}, {} a device", format_count(step.tokens_per_second),
           each < 100 ? format_number(each) : format_count(each))},
      {"MFU",
       format(
           "{} of the {} peak", format_percent(step.model_flops_utilisation),
           to_string(what.strategy.precision))},
      {"memory", format(
                     "{} of the fullest device's {}{}", format_bytes(peak),
                     format_bytes(usable), step.fits ? "" : ": does not fit")}};
  if (result.run.step_seconds.size() > 1) {
    const auto [least, most] = std::minmax_element(
        result.run.step_seconds.begin(), result.run.step_seconds.end());
    rows.push_back(
        {"steps",
         format(
             "{}, from {} to {}", format_count(result.run.step_seconds.size()),
             format_seconds(*least), format_seconds(*most))});
  }
  return rows;
}

void print_weeks(
    const SimulateCase& what, const EffectiveTime& weeks, std::ostream& out) {
  out << format("\n{:g} hours of it, with failures\n", what.failures.hours);
  const bool fails = weeks.hours_between_failures > 0;
  const Rows rows = {
      {"  steps that count", format_percent(weeks.share),
       "by formula " + format_percent(weeks.expected_share)},
      {"  saving", format_percent(weeks.saving),
       fails ? "a checkpoint after each " +
                   format_seconds(weeks.interval_seconds) + " of training"
             : ""},
      {"  repeated", format_percent(weeks.lost), ""},
      {"  recovering", format_percent(weeks.recovering),
       fails ? format(
                   "{} {}, one each {} h on average",
                   format_count(weeks.failures),
                   weeks.failures == 1 ? "failure" : "failures",
                   format_number(weeks.hours_between_failures))
             : "no failures; see --mean-hours-between-failures"}};
  out << aligned(rows);
}

}  // namespace

void print_simulation_text(
    const SimulateCase& what, const SimulateResult& result, std::ostream& out) {
  const StepEstimate& step = result.run.step;
  const int64_t ranks = what.strategy.layout.num_ranks();
  out << format(
      "{} on {}, {} of {} devices\n{}\n\n{}\ntime of the slowest rank's "
      "step\n",
      what.model.name, what.cluster.name, format_count(ranks),
      format_count(what.cluster.num_devices()), to_string(what.strategy),
      aligned(figures(what, result)));
  Rows rows;
  for (const auto& [name, seconds] : named_parts(step.parts)) {
    rows.push_back(
        {"  " + name, format_seconds(seconds),
         format_percent(seconds / step.parts.total())});
  }
  out << aligned(rows);
  if (result.weeks) print_weeks(what, *result.weeks, out);
  std::string simulated = ranks == 1 ? "the one rank" : "each rank";
  if (result.run.simulated_ranks < ranks) {
    simulated = format(
        "{} of {} ranks, the others do the same",
        format_count(result.run.simulated_ranks), format_count(ranks));
  }
  out << format(
      "\nsimulated {}; {} events in {}\n", simulated,
      format_count(result.run.events), format_seconds(result.wall_seconds));
}

void print_simulation_json(
    const SimulateCase& what, const SimulateResult& result, std::ostream& out) {
  const StepEstimate& step = result.run.step;
  Json json;
  json["model"] = what.model.name;
  json["cluster"] = what.cluster.name;
  json["strategy"] = to_string(what.strategy);
  json["layout"] = to_string(what.strategy.layout);
  json["step_seconds"] = step.step_seconds;
  json["steps"] = result.run.step_seconds;
  json[is_text(what) ? "tokens_per_second" : "samples_per_second"] =
      step.tokens_per_second;
  json["model_flops_utilisation"] = step.model_flops_utilisation;
  json["fits"] = step.fits;
  json["memory_bytes"] = step.memory.peak_bytes();
  json["usable_bytes"] = usable_bytes(fullest_device(what, step));
  Json parts;
  parts["matrix"] = step.parts.matrix;
  parts["memory"] = step.parts.memory;
  parts["recompute"] = step.parts.recompute;
  for (const Axis axis : kAxes) {
    const auto at = static_cast<size_t>(axis);
    parts["exposed"][std::string(to_string(axis))] = step.parts.exposed[at];
    json["communication"][std::string(to_string(axis))] =
        step.communication[at];
  }
  parts["bubble"] = step.parts.bubble;
  parts["optimizer"] = step.parts.optimizer;
  parts["other"] = step.parts.other;
  json["parts"] = parts;
  if (result.weeks) {
    const EffectiveTime& weeks = *result.weeks;
    json["effective_time"] = {
        {"hours", what.failures.hours},
        {"share", weeks.share},
        {"expected_share", weeks.expected_share},
        {"saving", weeks.saving},
        {"lost", weeks.lost},
        {"recovering", weeks.recovering},
        {"failures", weeks.failures},
        {"interval_seconds", weeks.interval_seconds},
        {"hours_between_failures", weeks.hours_between_failures}};
  }
  json["simulated_ranks"] = result.run.simulated_ranks;
  json["events"] = result.run.events;
  json["wall_seconds"] = result.wall_seconds;
  print_json(json, out);
}

}  // namespace echelon::cli
