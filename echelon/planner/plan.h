// Searches the strategies that train a model on a cluster, and explains them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cost/step_estimate.h"

namespace echelon::planner {

/// `devices` asks for the smallest number of devices on which the model fits.
enum class Objective { time, cost, devices };

/// The settings that are given; the others are searched. Contradictions throw
/// ConfigError.
struct PlanRequest {
  cost::ModelShape model;
  cluster::Cluster cluster;
  int64_t global_batch = 0;  // samples
  int64_t seq_len = 0;       // 0: the model's
  Objective objective = Objective::time;
  /// "tp=8", "recompute=none", "schedule=1f1b", …: key and value, as
  /// search_keys() (search_key.h) has them.
  std::vector<std::pair<std::string, std::string>> fixed;
  cluster::Precision precision = cluster::Precision::bf16;
  std::string framework = "echelon";
  /// The share of each device's memory that stays free, for texts: `cluster`
  /// has it deducted already (with_free_memory()).
  double free_share = 0;
  int64_t keep = 5;  // plans to return, each with a different layout
  /// Whether steps are simulated, event by event, before they are ranked; with
  /// formulas alone the order may be another.
  bool simulate = true;
  /// Searches fewer schedules and microbatch sizes, for drawings.
  bool coarse = false;
  /// Whether the textbook choices are searched too, for PlanResult::others.
  bool compare = true;
};

struct Plan {
  cost::Strategy strategy;
  cost::StepEstimate step;
  double cost_per_step = 0;  // of all devices; 0: unknown prices
  int64_t devices = 0;
};

/// An explanation, as `plan` and `explain` print it.
struct Reason {
  std::string diagnosis;  // what limits this model here: what it needs
  std::string fix;        // the strategy, or the setting
  std::string why;        // with the numbers
};

struct Rejected {
  std::string name;     // "pure data parallelism", "the runner-up"
  std::string because;  // "needs 2.6 TiB of the 79 GiB that a device has …"
  std::optional<Plan> plan;  // the best of its kind; empty when there is none
};

struct PlanResult {
  std::vector<Plan> plans;  // the best first; empty when nothing fits
  /// The plan that needs the least, if and only if nothing fits. `reason` says
  /// what it lacks and names the smallest sufficient cluster.
  std::optional<Plan> closest;
  std::optional<Plan> smallest;  // on that cluster
  Reason reason;
  std::vector<Rejected> others;
  int64_t considered = 0;   // strategies, before memory is saved
  int64_t pruned = 0;       // of those, by the bound on memory
  int64_t pruned_slow = 0;  // and by the bound on time
  int64_t estimated = 0;    // steps, by formulas
  int64_t simulated = 0;    // steps, event by event
  std::string bound;        // both, in words
};

/// The cluster with devices that have so much less memory: what a plan leaves
/// free.
cluster::Cluster with_free_memory(cluster::Cluster cluster, double free_share);

/// bf16, else fp16 where all devices have it, else fp32.
cluster::Precision usual_precision(const cluster::Cluster& cluster);

/// Takes about 2 s for 1,024 devices and 5 s for 16,384.
/// Throws ConfigError for a batch that no layout divides and for contradictory
/// constraints, which the message names.
PlanResult plan(const PlanRequest& request);

/// The fastest plan of each layout on `devices` devices, `keep` at most;
/// devices beyond the cluster are like its last nodes. Empty when none fits.
std::vector<Plan>
plans_on(const PlanRequest& request, int64_t devices, int64_t keep);

/// The best plan for one value of a setting ("tp"), as `--explain` shows it.
struct Alternative {
  std::string value;
  std::optional<Plan> plan;
  std::string because;  // why it is not the best; "the best" for that one
};
/// An alternative for each value of `key`. Throws ConfigError for an unknown
/// key, with the nearest.
std::vector<Alternative>
explain_key(const PlanRequest& request, const std::string& key);

}  // namespace echelon::planner
