// All strategies of a job, in two levels: groups, which share the work of a
// microbatch on a rank, and the variants of each.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/planner/search_key.h"
#include "echelon/planner/stack_rules.h"

namespace echelon {

/// What every strategy of a search has.
struct SearchJob {
  ModelShape model;
  Cluster cluster;
  int64_t devices = 0;  // that each strategy takes
  int64_t global_batch = 0;
  int64_t seq_len = 0;
  Precision precision = Precision::bf16;
  std::string stack = "echelon";
  Constraints constraints;
  /// Of one device of each group of nodes (device_sizes.h). Empty: all alike;
  /// then stages and batches have equal sizes.
  std::vector<double> speeds;
  /// 1F1B and interleaved schedules of 2 and 4 stages a rank, microbatches of
  /// powers of 2, sequence parallelism wherever it can be, stages 1 and 3.
  bool coarse = false;
};

/// Divisors, ascending.
std::vector<int64_t> divisors(int64_t number);

/// What pipeline stages share out: blocks, or counted layers.
int64_t num_layers(const ModelShape& model);

/// Numbers of axis_orders() that a layout may have: what the software takes,
/// the constraints allow, and costs differ in.
std::vector<int> orders_of(const SearchJob& job, const Layout& layout);

/// Layout, sequence parallelism and size of microbatches; the rest as it is by
/// default, with nothing done to save memory. Not sorted. Every one passes
/// check_strategy with one of its variants. Empty when the constraints or the
/// batch leave none.
///
/// The order of axes is the first of orders_of(); on a mixed cluster, where
/// what fits depends on it, each of them.
///
/// Sizes of microbatches: the divisors of a rank's batch up to 32, and its
/// halves. Where data-parallel ranks have devices of different speed, batches
/// in proportion to them too.
std::vector<Strategy> list_groups(const SearchJob& job);

/// The variants of a group: schedule and stages of a rank, stage of ZeRO, when
/// parameters are gathered. Not all of them pass check_strategy. Stages of a
/// rank: 2 to 16 that leave each stage the same number of blocks, or 2.
std::vector<Strategy>
list_variants(const SearchJob& job, const Strategy& group);

/// The same for many groups: those with one layout and one order have variants
/// alike but for the microbatches.
class VariantLists {
 public:
  explicit VariantLists(const SearchJob& job) : job_(job) {}
  /// The variants of a group like it.
  const std::vector<Strategy>& like(const Strategy& group);
  /// The group's own.
  std::vector<Strategy> of(const Strategy& group);

 private:
  const SearchJob& job_;
  std::map<std::pair<std::array<int64_t, 6>, AxisOrder>, std::vector<Strategy>>
      lists_;
};

}  // namespace echelon
