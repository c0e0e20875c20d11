#include "benchmarks/published/planned.h"

#include <map>
#include <string>

#include "benchmarks/published/row_cluster.h"
#include "benchmarks/published/row_model.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/error.h"
#include "echelon/planner/plan.h"
#include "echelon/planner/search_key.h"

namespace echelon {
namespace {

constexpr int64_t kEveryLayout = 1 << 20;

/// Everything in the row that is not a degree.
std::vector<std::pair<std::string, std::string>>
fixed_of(const cost::Strategy& strategy) {
  std::vector<std::pair<std::string, std::string>> fixed;
  const auto fix = [&](const char* name) {
    const planner::SearchKey& key = planner::find_search_key(name);
    fixed.emplace_back(name, key.text_of(key.value(strategy)));
  };
  fix("microbatch");
  fix("recompute");
  if (strategy.recompute != cost::Recompute::none) fix("recompute_layers");
  if (strategy.layout.tp > 1) fix("sequence_parallel");
  if (strategy.layout.pp > 1) {
    fix("schedule");
    fix("stages_per_rank");
  }
  fix(strategy.zero_stage > 0 ? "dp" : "fsdp");
  if (strategy.zero_stage > 0) {
    fix("stage");
    fix("gather");
  }
  return fixed;
}

planner::PlanRequest request_of(const RowPrediction& one) {
  return {
      .model = model_of(one.row),
      .cluster = cluster_of(one.row),
      .global_batch = one.strategy.global_batch,
      .seq_len = one.strategy.seq_len,
      .fixed = fixed_of(one.strategy),
      .precision = one.strategy.precision,
      .framework = one.strategy.framework,
      .keep = kEveryLayout,
      .simulate = true,
      .compare = false};
}

/// Rows with one text belong to one request.
std::string
text_of(const RowPrediction& one, const planner::PlanRequest& request) {
  const StepRow& row = one.row;
  std::string text =
      cluster::to_toml(request.cluster) + row.model + request.framework;
  for (const int64_t number :
       {row.layers, row.hidden, row.heads, row.kv_heads, row.ffn, row.vocab,
        row.seq, row.global_batch,
        static_cast<int64_t>(one.strategy.precision)}) {
    text += " " + std::to_string(number);
  }
  for (const auto& [key, value] : request.fixed)
    text += " " + key + "=" + value;
  return text;
}

std::vector<planner::Plan> plans_of(const planner::PlanRequest& request) {
  try {
    return planner::plan(request).plans;
  } catch (const ConfigError&) {
    return {};  // the software's rules leave no layout
  }
}

}  // namespace

std::vector<std::optional<double>>
planned_seconds(const std::vector<RowPrediction>& predictions) {
  std::map<std::string, std::vector<planner::Plan>> known;
  std::vector<std::optional<double>> seconds;
  for (const RowPrediction& one : predictions) {
    seconds.emplace_back();
    if (!one.predicted()) continue;
    const planner::PlanRequest request = request_of(one);
    const std::string text = text_of(one, request);
    if (!known.contains(text)) known[text] = plans_of(request);
    for (const planner::Plan& plan : known[text]) {
      if (plan.strategy.layout.same_degrees(one.strategy.layout)) {
        seconds.back() = plan.step.step_seconds;
      }
    }
  }
  return seconds;
}

}  // namespace echelon
