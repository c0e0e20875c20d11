// The search for what held a run back: how each rank's steps spend their time
// (computing, communicating, or waiting for data, other ranks or other stages),
// what a pipeline's passes take, what other settings would give, and one search
// for each family of faults.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/explain/explain.h"
#include "echelon/explain/run_record.h"
#include "echelon/layout/layout.h"
#include "echelon/predict/configured.h"
#include "echelon/simulator/simulate.h"
#include "echelon/timeline/intervals.h"
#include "echelon/timeline/timeline.h"

namespace echelon::explain {

/// How layouts spell the axis of a group of ranks: "fsdp" for the groups that
/// shard parameters, "dp" for "dp_replicate" and for the groups that sum
/// gradients (comm/mesh_groups.h).
std::string axis_of_group(const std::string& group);

/// Seconds of one rank in a step. Without idle time they sum to the step.
struct RankTimes {
  double step = 0;
  double forward = 0;
  double backward = 0;
  double optimizer = 0;
  double data = 0;
  /// Exposed communication by axis ("dp", "fsdp", "tp", …), from when every
  /// rank of the group had come. For "pp", messages that were already computed;
  /// "" for the rest.
  std::map<std::string, double> communication;
  double for_ranks = 0;   // waiting in collectives for ranks that came later
  double for_stages = 0;  // waiting for what other pipeline stages compute
  double idle = 0;        // nothing was recorded

  double compute() const { return forward + backward + optimizer; }
};

/// A rank in each of the typical steps.
struct RankHistory {
  int32_t rank = 0;
  int32_t first_stage = 0;  // of the pipeline; the same for peers
  std::vector<RankTimes> steps;
  RankTimes mean;
};

struct RunTimes {
  std::vector<RankHistory> ranks;  // by rank
  std::vector<int64_t> steps;  // typical ones: at most three times the median
  RankTimes mean;              // over ranks
  bool pipeline = false;
};

/// Each number of `times` as a share of its step.
RankTimes shares_of(const RankTimes& times);

using RankStep = std::pair<int32_t, int64_t>;  // rank, step

/// How long ranks wait in collectives for those that come late.
struct LateRanks {
  /// The times from when a rank came to a collective until the last one of its
  /// group did.
  std::map<RankStep, timeline::Intervals> waits;
  /// For each last rank, the time in which some rank waited for it.
  std::map<RankStep, timeline::Intervals> caused;
};

/// Matches the calls of one collective by axis, name and order in the step. The
/// layout says which ranks form a group. Without one, all ranks do if the
/// step's collectives are along one axis; otherwise nothing is known. Messages
/// between pipeline stages are left out.
LateRanks late_ranks(
    const timeline::Timeline& timeline, const std::optional<Layout>& layout);

/// The times of `timeline`, without ranks when no step was recorded.
RunTimes run_times(
    const timeline::Timeline& timeline, const std::optional<Layout>& layout);

/// The time of a pipeline's passes, and of its schedule with such passes.
struct StageCosts {
  /// Forward and backward of a microbatch, by stage, without waits: means over
  /// the typical steps and the replicas of the pipeline.
  std::vector<double> seconds;
  /// The time of the run's own order of passes, from the first begin to the
  /// last end: with these costs, and with the same costs for all stages. Means
  /// over the steps.
  double as_they_are = 0;
  double even = 0;
  double busy_share = 0;           // the share of `even` that a rank computes
  std::vector<int> slowest_ranks;  // that hold the slowest stage
};

/// Empty when the timeline has no pipeline, or its passes cannot be put in
/// order.
std::optional<StageCosts> stage_costs(
    const timeline::Timeline& timeline, const std::vector<int64_t>& steps);

/// Settings as `--set` takes them: "layout.microbatches=8".
using Settings = std::vector<std::string>;

struct WhatIfStep {
  Settings settings;
  predict::Configured configured;
  cost::StepEstimate step;
  double seconds_per_sample = 0;
};

/// Simulates a run's configuration on a cluster, as it is and changed. Only the
/// ratio of the two counts: a cluster whose rates are guessed errs the same way
/// in both.
class WhatIf {
 public:
  /// Without `cluster`, takes that of a simulated run, or this machine
  /// (cluster/local_cluster.h). Takes the run's counted layers if it has them,
  /// else those of formulas. Tries settings until that has taken `seconds`: see
  /// num_left_out().
  WhatIf(
      const RunRecord& run, const std::optional<cluster::Cluster>& cluster,
      double seconds = 10);

  /// The run as it is; empty: it cannot be simulated, and why() says why.
  const std::optional<WhatIfStep>& base() const { return base_; }
  const std::string& why() const { return why_; }
  const cluster::Cluster& cluster() const { return cluster_; }
  /// Whether its rates are guesses, so that times do not compare with the
  /// run's.
  bool is_guessed() const { return guessed_; }

  /// How many settings were left out, because they would have taken too long.
  int64_t num_left_out() const { return left_out_; }
  /// Why no setting is a fix: `why`, unless settings were left out.
  std::string none_found(const std::string& why) const;

  /// Empty when there is no base, the settings are invalid for this run, or
  /// they were left out.
  std::optional<WhatIfStep> with(const Settings& settings) const;
  /// The share by which a sample's time falls; negative: it rises.
  double gain(const WhatIfStep& other) const;
  /// The step that fits and gains most, at least `least`, if there is one.
  std::optional<WhatIfStep>
  best_of(const std::vector<Settings>& all, double least = 0.01) const;

 private:
  void find_cluster_of(const RunRecord& run);
  WhatIfStep simulated(const Settings& settings) const;
  bool has_time_for(const cost::Strategy& strategy) const;

  const RunRecord& run_;
  std::optional<DataFacts> data_;  // looked at once; fixes leave it as it is
  cluster::Cluster cluster_;
  bool guessed_ = false;
  double seconds_;  // the budget for simulations
  mutable double spent_ = 0;
  mutable int64_t left_out_ = 0;
  double seconds_of_pass_ = 0;  // for simulating a pass of the base
  std::optional<WhatIfStep> base_;
  std::string why_;
};

/// The share of a step below which a fault is not reported: machines vary by as
/// much.
inline constexpr double kLeastShare = 0.05;
/// The same for waits, which a busy machine can cause by itself when it stops a
/// rank for a moment.
inline constexpr double kLeastWait = 0.10;

struct Evidence {
  const RunRecord& run;
  const RunTimes& times;    // without ranks: there is no timeline
  const RankTimes& shares;  // of the step, mean over ranks
  const WhatIf& what_if;
};

/// Waiting for the next batch; with metrics alone, as rank 0 saw it.
std::vector<RunFinding> find_data_loading(const Evidence& evidence);

/// Exposed collectives, by axis, from when all of their ranks had come.
std::vector<RunFinding> find_exposed_communication(const Evidence& evidence);

/// The waits of a pipeline's ranks for each other, in three parts: those that
/// uneven stages cause (the run's own passes, with and without the difference),
/// the bubble of the schedule with even stages, and the rest, which passes
/// cause that sometimes take longer.
std::vector<RunFinding> find_pipeline_waits(const Evidence& evidence);

/// A straggler, which takes longer than its peers in most steps for the same
/// work; and ranks that wait for each other for any other reason.
std::vector<RunFinding> find_uneven_ranks(const Evidence& evidence);

/// Memory near its limit, and recomputed layers although there is room.
std::vector<RunFinding> find_memory(const Evidence& evidence);

/// Work of a step that does not grow with its batch.
std::vector<RunFinding> find_small_batch(const Evidence& evidence);

/// Takes the settings of `step` as the fix, with their simulated gain.
void take_simulated_fix(
    const Evidence& evidence, const WhatIfStep& step, RunFinding& found);

}  // namespace echelon::explain
