#include <nlohmann/json.hpp>
#include <ostream>

#include "echelon/cli/plan_print.h"
#include "echelon/planner/configuration.h"
#include "echelon/planner/reasons.h"
#include "echelon/planner/search_key.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

Json strategy_json(const Strategy& strategy) {
  Json json;
  json["text"] = to_string(strategy);
  for (const auto& key : search_keys()) {
    const int64_t value = key.value(strategy);
    if (key.words.empty()) {
      json[key.name] = value;
    } else if (key.words[0] == "false") {
      json[key.name] = value == 1;
    } else {
      json[key.name] = key.text_of(value);
    }
  }
  return json;
}

Json by_axis(const std::array<double, 6>& seconds) {
  Json json;
  for (size_t i = 0; i < kAxes.size(); ++i) {
    json[std::string(to_string(kAxes[i]))] = seconds[i];
  }
  return json;
}

Json memory_json(const MemoryEstimate& memory) {
  Json json;
  json["peak_bytes"] = memory.peak_bytes();
  json["reserved_bytes"] = memory.reserved_bytes;
  json["host_bytes"] = memory.host_bytes;
  for (const auto& rank : memory.ranks) {
    Json kinds;
    for (const MemoryKind kind : kMemoryKinds) {
      kinds[std::string(to_string(kind))] = rank[kind];
    }
    json["pipeline_ranks"].push_back(kinds);
  }
  return json;
}

Json plan_json(const Plan& plan, const PlanRequest& request) {
  const StepEstimate& step = plan.step;
  const StepParts& parts = step.parts;
  Json json;
  json["strategy"] = strategy_json(plan.strategy);
  json["devices"] = plan.devices;
  json["step_seconds"] = step.step_seconds;
  json[request.model.transformer ? "tokens_per_second" : "samples_per_second"] =
      step.tokens_per_second;
  json["model_flops_utilisation"] = step.model_flops_utilisation;
  json["computing_share"] = computing_share(step);
  json["cost_per_step"] = plan.cost_per_step;
  json["seconds"] = {{"matrix", parts.matrix},       {"memory", parts.memory},
                     {"recompute", parts.recompute}, {"bubble", parts.bubble},
                     {"optimizer", parts.optimizer}, {"other", parts.other}};
  json["exposed_seconds"] = by_axis(parts.exposed);
  json["communication_seconds"] = by_axis(step.communication);
  json["memory"] = memory_json(step.memory);
  json["fits"] = step.fits;
  json["configuration"] = to_configuration(plan, request);
  return json;
}

}  // namespace

void print_plan_json(
    const PlanRequest& request, const PlanResult& result, std::ostream& out) {
  Json json;
  json["model"] = request.model.name;
  json["parameters"] = request.model.num_parameters();
  json["cluster"] = request.cluster.name;
  json["devices"] = request.cluster.num_devices();
  json["usable_bytes"] = usable_device_bytes(request.cluster);
  json["batch"] = request.global_batch;
  json["stack"] = request.stack;
  json["considered"] = result.considered;
  json["pruned_by_memory"] = result.pruned;
  json["pruned_by_time"] = result.pruned_slow;
  json["estimated"] = result.estimated;
  json["bound"] = result.bound;
  json["plans"] = Json::array();
  for (const auto& plan : result.plans) {
    json["plans"].push_back(plan_json(plan, request));
  }
  if (result.closest) json["closest"] = plan_json(*result.closest, request);
  if (result.smallest) {
    json["smallest_cluster"] = plan_json(*result.smallest, request);
  }
  json["diagnosis"] = result.reason.diagnosis;
  json["fix"] = result.reason.fix;
  json["why"] = result.reason.why;
  json["others"] = Json::array();
  for (const auto& other : result.others) {
    Json one = {{"name", other.name}, {"because", other.because}};
    if (other.plan) one["plan"] = plan_json(*other.plan, request);
    json["others"].push_back(one);
  }
  out << json.dump(2) << "\n";
}

void print_alternatives_json(
    const PlanRequest& request, const std::string& key,
    const std::vector<Alternative>& rows, std::ostream& out) {
  Json json;
  json["key"] = key;
  json["values"] = Json::array();
  for (const auto& row : rows) {
    Json one = {{"value", row.value}, {"because", row.because}};
    if (row.plan) one["plan"] = plan_json(*row.plan, request);
    json["values"].push_back(one);
  }
  out << json.dump(2) << "\n";
}

}  // namespace echelon::cli
