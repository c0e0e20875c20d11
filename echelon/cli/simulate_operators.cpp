// The part of `echelon simulate --count` that only counted layers allow: which
// operators a step consists of, and the same job by the formulas that plan and
// simulate use without a count. Their parts stand side by side. Where the steps
// differ, a sentence names the part with the largest difference and its longest
// operators.
#include <algorithm>
#include <array>
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
constexpr std::array kBounds = {
    cost::Bound::products, cost::Bound::memory, cost::Bound::launches,
    cost::Bound::collectives};

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

// The operators that a part consists of, by what bounds them; empty for parts
// that are formulas in both.
std::vector<cost::Bound> bounds_of(const std::string& part) {
  if (part == "matmuls, attention") return {cost::Bound::products};
  if (part == "other operators, launches") {
    return {cost::Bound::memory, cost::Bound::launches};
  }
  return {};
}

// "_scaled_dot_product_flash_attention_for_cpu" stands for any fused attention.
std::string short_name(const cost::StepOperator& one) {
  constexpr size_t kMost = 16;
  std::string name = one.name;
  if (name.starts_with("_scaled_dot_product_")) name = "attention";
  if (name.size() > kMost) name = name.substr(0, kMost - 1) + "…";
  return name + (one.backward ? " bwd" : "");
}

// The operators of a part that take longest, in a sentence.
std::string longest_text(
    const cost::StepOperators& all, const std::vector<cost::Bound>& bounds) {
  std::vector<std::string> names;
  for (const cost::StepOperator& one : all.operators) {
    if (names.size() == 3) break;
    if (std::ranges::find(bounds, one.bound) == bounds.end()) continue;
    names.push_back(
        format("{} ({})", short_name(one), format_seconds(one.seconds)));
  }
  return names.empty()
             ? ""
             : format(" The longest counted there: {}.", join(names, ", "));
}

Rows operator_rows(const cost::StepOperators& all) {
  Rows rows;
  for (const cost::StepOperator& one : all.operators) {
    if (rows.size() == kMostOperators) break;
    rows.push_back(
        {"  " + short_name(one), one.shape, format_count(one.calls),
         format_seconds(one.seconds), format_percent(one.seconds / all.seconds),
         std::string(to_string(one.bound))});
  }
  return rows;
}

}  // namespace

void print_operators(const SimulateCase& what, const cost::StepEstimate& step) {
  const cost::StepOperators all =
      cost::step_operators(what.model, what.strategy, what.cluster);
  const auto microbatches =
      static_cast<double>(what.strategy.num_microbatches());
  std::cout << "\nwhat bounds the operators of the slowest rank\n";
  Rows bounds;
  for (const auto bound : kBounds) {
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
                   "a microbatch: {} kernels, {} views; {}\n",
                   format_count(all.kernels / microbatches),
                   format_count(all.views / microbatches),
                   all.launch_seconds > 0
                       ? format(
                             "the host launches them in {} a step",
                             format_seconds(all.launch_seconds))
                       : "steps are CUDA graphs")
            << "\noperators that take longest, of all layers, in a step\n";
  std::cout << aligned(operator_rows(all));
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
  const std::string reckoned = format(
      "`echelon plan` reckons with {} a step.",
      format_seconds(planned.step_seconds));
  std::cout << aligned(rows) << prose(reckoned, 0, 80) << "\n";
  if (std::abs(counted.step_seconds - simulated.step_seconds) <=
      0.05 * simulated.step_seconds) {
    return;
  }
  const std::string& part = left[most].first;
  const cost::StepOperators all =
      cost::step_operators(what.model, what.strategy, what.cluster);
  std::cout << wrapped(
                   format(
                       "They differ most in \"{}\".{}", part,
                       longest_text(all, bounds_of(part))),
                   0, 80)
            << "\n";
}

Json operators_json(const SimulateCase& what) {
  const cost::StepOperators all =
      cost::step_operators(what.model, what.strategy, what.cluster);
  Json json;
  json["kernels"] = all.kernels;
  json["views"] = all.views;
  json["launch_seconds"] = all.launch_seconds;
  json["host_waits"] = all.waits;
  for (const auto bound : kBounds) {
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
