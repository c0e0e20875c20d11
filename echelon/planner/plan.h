// Searches the strategies that train a model on a cluster, and says why.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/cost/step_estimate.h"

namespace echelon {

enum class Objective { time, cost, devices };  // devices: the smallest that fits

/// What is given; the rest is searched. Contradictions are ConfigErrors.
struct PlanRequest {
  ModelShape model;
  Cluster cluster;
  int64_t global_batch = 0;  // samples
  int64_t seq_len = 0;       // 0: the model's
  Objective objective = Objective::time;
  /// "tp=8", "recompute=none", "schedule=1f1b", …: key and value.
  std::vector<std::pair<std::string, std::string>> fixed;
  Precision precision = Precision::bf16;
  std::string stack = "echelon";
  int64_t keep = 5;  // plans to return
};

struct Plan {
  Strategy strategy;
  StepEstimate step;
  double cost_per_step = 0;  // of all devices; 0: prices not known
  int64_t devices = 0;
};

/// Why: the headings that `plan` and `explain` share.
struct Reason {
  std::string diagnosis;  // what limits this model here
  std::string fix;        // the strategy, or the setting
  std::string why;        // with the numbers
};

struct Rejected {
  std::string name;      // "pure data parallelism", "second best"
  Plan plan;
  std::string because;   // "needs 2.6 TiB of 79 GiB a device: weights alone 1.3 TiB"
};

struct PlanResult {
  std::vector<Plan> plans;  // the best first; empty when nothing fits
  std::optional<Plan> closest;  // when nothing fits: what it lacks is in `reason`
  Reason reason;
  std::vector<Rejected> others;
  int64_t considered = 0;  // strategies
  int64_t pruned = 0;      // by the bound on memory
  std::string bound;       // in words
};

/// 1,024 devices in under 2 s. Throws ConfigError for a batch that no layout
/// divides and for contradictory constraints, both named.
PlanResult plan(const PlanRequest& request);

/// The tables of a configuration that `echelon train` takes.
std::string to_configuration(const Plan& plan, const PlanRequest& request);

}  // namespace echelon
