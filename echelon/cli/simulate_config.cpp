#include "echelon/cli/simulate_config.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "echelon/job/job.h"
#include "echelon/planner/configuration.h"
#include "echelon/predict/configured.h"

namespace echelon::cli {
namespace {

std::string set(const char* key, int64_t value) {
  return std::string(key) + "=" + std::to_string(value);
}

std::string set(const char* key, const std::string& value) {
  return std::string(key) + "=\"" + value + "\"";
}

// The strategy's passes of a step, as the configuration has them.
void set_passes(const Strategy& strategy, std::vector<std::string>& settings) {
  settings.push_back(set("train.batch", strategy.global_batch));
  settings.push_back(
      set(strategy.layout.pp > 1 ? "layout.microbatches" : "train.accumulate",
          strategy.num_microbatches()));
}

// Of the flags that were given.
std::vector<std::string>
settings_of(const SimulateArguments& arguments, const Strategy& strategy) {
  std::vector<std::string> settings;
  if (!arguments.batch.empty() || !arguments.microbatch.empty()) {
    set_passes(strategy, settings);
  }
  if (!arguments.seq_len.empty()) {
    settings.push_back(set("data.sequence", strategy.seq_len));
  }
  if (!arguments.schedule.empty()) {
    settings.push_back(set("layout.schedule", strategy.schedule));
  }
  if (!arguments.stages_per_rank.empty()) {
    settings.push_back(set("layout.stages_per_rank", strategy.stages_per_rank));
  }
  if (!arguments.recompute.empty()) {
    settings.push_back(set("memory.recompute", to_string(strategy.recompute)));
  }
  if (!arguments.zero.empty()) {
    settings.push_back(set("shard.stage", strategy.zero_stage));
  }
  if (strategy.precision == Precision::bf16 ||
      strategy.precision == Precision::fp16) {
    settings.push_back(
        set("precision.compute", std::string(to_string(strategy.precision))));
  }
  if (arguments.sequence_parallel) {
    settings.push_back("layout.sequence_parallel=true");
  }
  return settings;
}

Job planned_job(const SimulateCase& what) {
  const Strategy& strategy = what.strategy;
  const PlanRequest request{
      .model = what.model,
      .cluster = what.cluster,
      .global_batch = strategy.global_batch,
      .seq_len = strategy.seq_len,
      .precision = strategy.precision,
      .stack = strategy.stack};
  const Plan plan{.strategy = strategy};
  Job job = parse_job(to_configuration(plan, request), "what was simulated");
  job.optimizer.name = strategy.optimizer;
  job.train.steps = what.options.steps;
  if (job.data.name != "images") return job;
  job.data.name = "dummy";
  job.data.shape = {3, job.data.image_size, job.data.image_size};
  job.data.classes = what.model.layers.back().columns;
  job.data.holdout = 0;
  job.data.samples = std::max(job.data.samples, 2 * strategy.global_batch);
  return job;
}

// What of the strategy no configuration says.
std::string not_said(const Strategy& strategy, const Job& job) {
  std::string list;
  const auto add = [&](const std::string& flag) {
    list += (list.empty() ? "" : ", ") + flag;
  };
  if (strategy.stack != "echelon") add("--stack " + strategy.stack);
  if (configured_strategy(job).precision != strategy.precision) {
    add("--precision " + std::string(to_string(strategy.precision)));
  }
  if (list.empty()) return "";
  return "config.toml does not say " + list + ", which echelon train has not";
}

}  // namespace

SimulatedConfiguration
configuration_of(const SimulateArguments& arguments, const SimulateCase& what) {
  if (arguments.config.empty() && !is_trained_here(what.model)) {
    return {
        .missing =
            "there is no config.toml: echelon train has no " + what.model.name};
  }
  const Job job =
      arguments.config.empty()
          ? planned_job(what)
          : load_job(
                arguments.config, {.set = settings_of(arguments, what.strategy),
                                   .layout = arguments.layout});
  return {to_toml(job), not_said(what.strategy, job)};
}

}  // namespace echelon::cli
