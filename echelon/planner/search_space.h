// All strategies of a job, in two levels: groups, which share the work of a
// microbatch on a rank, and the variants of each.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/planner/search_key.h"

namespace echelon::planner {

/// What a training framework supports, as far as the search covers it.
struct FrameworkRules {
  bool context_parallel = true;
  bool expert_parallel = true;
  bool pipelines = true;
  bool tensor_parallel = true;
  std::vector<ScheduleKind> schedules;  // of pipelines
  std::vector<int> zero_stages;         // of fsdp > 1
  bool unshard_once = false;       // stage 3 may keep parameters for a step
  std::vector<int> orders;         // of axes: indices of axis_orders()
  bool offload = false;            // optimizer and activations to the host
  bool partial_selective = false;  // selective recompute of some layers
  bool sequence_parallel = true;
};

/// "echelon" stands for this project's trainer: what check_job
/// (job/check_job.h) accepts. Others are as their documentation says.
FrameworkRules rules_of_framework(const std::string& framework);

/// What all strategies of a search have in common.
struct SearchJob {
  cost::ModelShape model;
  cluster::Cluster cluster;
  int64_t devices = 0;  // of each strategy
  int64_t global_batch = 0;
  int64_t seq_len = 0;
  cluster::Precision precision = cluster::Precision::bf16;
  std::string framework = "echelon";
  Constraints constraints;
  /// The speed of a device of each group of nodes (device_sizes.h). Empty when
  /// all are alike; stages and batches then have equal sizes.
  std::vector<double> speeds;
  /// Searches only 1F1B and interleaved schedules of 2 and 4 stages a rank,
  /// microbatches of powers of 2, sequence parallelism wherever possible, and
  /// stages 1 and 3.
  bool coarse = false;
  /// Ranks simulated steps; otherwise those of formulas.
  bool simulate = false;
};

/// A combination of savings of memory.
struct MemorySaver {
  bool offload_optimizer = false;
  bool offload_activations = false;
  cost::Recompute recompute = cost::Recompute::none;
};

/// All that the constraints allow, those that offload more later, and of these
/// those that recompute more. `offload`: whether the host's memory may be used.
/// Empty when the constraints contradict each other.
std::vector<MemorySaver> list_savers(const SearchJob& job, bool offload);

/// The layers of a stage to recompute, where the constraints set a number.
std::optional<int64_t> asked_recompute_layers(const SearchJob& job);

/// Layers of the longest stage.
int64_t
layers_of_stage(const cost::ModelShape& model, const cost::Strategy& strategy);

/// Whether the job has any strategy, whatever the memory.
bool has_strategy(const SearchJob& job);

/// Divisors, ascending.
std::vector<int64_t> divisors(int64_t number);

/// The layers that are partitioned into pipeline stages: blocks, or counted
/// layers.
int64_t num_layers(const cost::ModelShape& model);

/// The axis_orders() of a layout, by number, that the framework supports, that
/// the constraints allow and in which costs differ.
std::vector<int> orders_of(const SearchJob& job, const Layout& layout);

/// Strategies that differ in layout, sequence parallelism and size of
/// microbatches; the rest has its default, with no savings of memory. Not
/// sorted. Each passes check_strategy with one of its variants. Empty when the
/// constraints or the batch leave none.
///
/// The order of axes is the first of orders_of(); on a mixed cluster, where
/// what fits depends on it, each of them.
///
/// Microbatches have the sizes that divide a rank's batch, up to 32, and its
/// halves. Where data-parallel ranks have devices of different speed, batches
/// in proportion to the speeds are added.
std::vector<cost::Strategy> list_groups(const SearchJob& job);

/// The variants of a group, which differ in schedule, stages of a rank, ZeRO
/// stage and how long parameters stay unsharded. Not all of them pass
/// check_strategy. A rank has 2 to 16 stages: the fewest for each length of the
/// longest stage, and every number that gives all stages as many blocks, or one
/// block at most (where embedding or head have stages of their own).
std::vector<cost::Strategy>
list_variants(const SearchJob& job, const cost::Strategy& group);

/// The same for many groups. Groups with the same layout and order have the
/// same variants, apart from the microbatches.
class VariantLists {
 public:
  explicit VariantLists(const SearchJob& job) : job_(job) {}
  /// The variants of a group like it.
  const std::vector<cost::Strategy>& like(const cost::Strategy& group);
  /// The group's own.
  std::vector<cost::Strategy> of(const cost::Strategy& group);

 private:
  const SearchJob& job_;
  std::map<
      std::pair<std::array<int64_t, 6>, AxisOrder>, std::vector<cost::Strategy>>
      lists_;
};

}  // namespace echelon::planner
