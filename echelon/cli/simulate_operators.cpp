// The part of `echelon simulate --count` that only counted layers allow: which
// operators a step consists of, and the same job by the formulas that plan and
// simulate use without a count. Their parts stand side by side, and a sentence
// names the largest difference.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <utility>

#include "echelon/cli/simulate.h"
#include "echelon/cli/terminal.h"
#include "echelon/cost/step_operators.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostOperators = 10;

double exposed(const cost::StepParts& parts) {
  double sum = 0;
  for (const double one : parts.exposed) sum += one;
  return sum;
}

std::vector<std::pair<std::string, double>>
compared_parts(const cost::StepParts& parts) {
  return {
      {"matmuls, attention", parts.matrix},
      {"other operators, launches", parts.memory},
      {"recompute", parts.recompute},
      {"waiting for other ranks", exposed(parts)},
      {"pipeline bubble", parts.bubble},
      {"optimizer", parts.optimizer},
      {"other", parts.other}};
}

// Why the two differ most, in a sentence.
std::string reason(const std::string& part) {
  if (part == "matmuls, attention") {
    return "The formulas take the published shapes, the count those that run: "
           "an unpadded vocabulary or small products reach less of the peak.";
  }
  if (part == "other operators, launches") {
    return "The formulas assume fused kernels for norms, activations, rotary "
           "positions and the loss; the program runs each operator by itself.";
  }
  if (part == "recompute") {
    return "The program recomputes each operator by itself, the formulas fused "
           "ones.";
  }
  if (part == "waiting for other ranks") {
    return "Slower layers hide more communication; and within layers the "
           "program may send more often than the formulas say.";
  }
  if (part == "pipeline bubble") {
    return "Stages differ more in time where each is counted as it runs.";
  }
  return "";
}

Rows operator_rows(const cost::StepOperators& all) {
  Rows rows;
  for (const cost::StepOperator& one : all.operators) {
    if (rows.size() == kMostOperators) break;
    rows.push_back(
        {"  " + one.name + (one.backward ? ", backward" : ""), one.shape,
         format_count(one.calls), format_seconds(one.seconds),
         format_percent(one.seconds / all.seconds),
         std::string(to_string(one.bound))});
  }
  return rows;
}

// Names of operators may be long: terminals have 80 columns.
void shorten(Rows& rows) {
  constexpr size_t kName = 24;
  for (auto& row : rows) {
    std::string& name = row.front();
    const size_t comma = name.find(", backward");
    const std::string end = comma == name.npos ? "" : name.substr(comma);
    name = name.substr(0, comma);
    const std::string scores = "_scaled_dot_product_";
    if (name.starts_with("  " + scores)) name = "  attention";
    if (name.size() > kName) name = name.substr(0, kName - 1) + "…";
    name += end;
  }
}

}  // namespace

void print_operators(const SimulateCase& what, const cost::StepEstimate& step) {
  const cost::StepOperators all =
      cost::step_operators(what.model, what.strategy, what.cluster);
  const auto microbatches =
      static_cast<double>(what.strategy.num_microbatches());
  std::cout << "\nwhat bounds the operators of the slowest rank\n";
  Rows bounds;
  for (const auto bound :
       {cost::Bound::products, cost::Bound::memory, cost::Bound::launches,
        cost::Bound::collectives}) {
    const double seconds = all.seconds_of(bound);
    if (seconds <= 0) continue;
    bounds.push_back(
        {format("  {}", to_string(bound)), format_seconds(seconds),
         format_percent(seconds / step.step_seconds) + " of the step"});
  }
  if (all.waits > 0) {
    bounds.push_back(
        {"  waiting for the host", format_seconds(all.waits),
         format_percent(all.waits / step.step_seconds) + " of the step"});
  }
  std::cout << aligned(bounds)
            << format(
                   "{} kernels and {} views a microbatch; the host takes {} a "
                   "step to launch them\n",
                   format_count(all.kernels / microbatches),
                   format_count(all.views / microbatches),
                   format_seconds(all.launch_seconds))
            << "\noperators that take longest, of all layers, in a step\n";
  Rows rows = operator_rows(all);
  shorten(rows);
  std::cout << aligned(rows);
}

void print_beside_formulas(
    const SimulateCase& what, const cost::StepEstimate& counted) {
  if (!what.formulas) return;
  simulator::SimulationOptions options = what.options;
  options.timeline_ranks = 0;
  const cost::StepEstimate simulated =
      simulator::simulate(*what.formulas, what.strategy, what.cluster, options)
          .step;
  const cost::StepEstimate planned =
      cost::estimate_step(*what.formulas, what.strategy, what.cluster);
  std::cout << "\nbeside the formulas\n";
  Rows rows = {{"", "counted", "formulas"}};
  const auto left = compared_parts(counted.parts);
  const auto right = compared_parts(simulated.parts);
  size_t most = 0;
  for (size_t i = 0; i < left.size(); ++i) {
    const auto apart = [&](size_t at) {
      return std::abs(left[at].second - right[at].second);
    };
    if (apart(i) > apart(most)) most = i;
    if (left[i].second <= 0 && right[i].second <= 0) continue;
    rows.push_back(
        {"  " + left[i].first, format_seconds(left[i].second),
         format_seconds(right[i].second)});
  }
  rows.push_back(
      {"  step", format_seconds(counted.step_seconds),
       format_seconds(simulated.step_seconds)});
  rows.push_back(
      {"  MFU", format_percent(counted.model_flops_utilisation),
       format_percent(simulated.model_flops_utilisation)});
  std::cout << aligned(rows)
            << format(
                   "`echelon plan` reckons with {} a step.\n",
                   format_seconds(planned.step_seconds));
  const std::string why = reason(left[most].first);
  const bool apart = std::abs(counted.step_seconds - simulated.step_seconds) >
                     0.05 * simulated.step_seconds;
  if (apart && !why.empty()) {
    std::cout
        << wrapped(
               format("They differ most in \"{}\". {}", left[most].first, why),
               0, 80)
        << "\n";
  }
}

Json operators_json(const SimulateCase& what) {
  const cost::StepOperators all =
      cost::step_operators(what.model, what.strategy, what.cluster);
  Json json;
  json["kernels"] = all.kernels;
  json["views"] = all.views;
  json["launch_seconds"] = all.launch_seconds;
  json["host_waits"] = all.waits;
  for (const auto bound :
       {cost::Bound::products, cost::Bound::memory, cost::Bound::launches,
        cost::Bound::collectives}) {
    json["bounds"][std::string(to_string(bound))] = all.seconds_of(bound);
  }
  json["operators"] = Json::array();
  for (const cost::StepOperator& one : all.operators) {
    json["operators"].push_back(
        {{"name", one.name},
         {"shape", one.shape},
         {"backward", one.backward},
         {"bound", to_string(one.bound)},
         {"calls", one.calls},
         {"seconds", one.seconds}});
  }
  return json;
}

}  // namespace echelon::cli
