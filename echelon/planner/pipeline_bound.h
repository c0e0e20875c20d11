// The least time of a step, from what each rank of a pipeline computes.
//
// A rank r computes forward and backward of each of the m microbatches through
// its stages: m busy(r) seconds. Let s be the lowest of its stages.
//
// 1. It begins when a first microbatch has passed the stages below s, which are
//    on other ranks.
// 2. Where schedules do not split backward, its last action is a backward
//    through s (a higher stage of the microbatch would be followed by s), and
//    the stages below s follow.
//
// So no schedule ends before
//
//    sum of forward (2.: and backward) of the stages below s + m busy(r),
//
// and a step takes as long as its slowest pipeline.
//
// For every way to partition n layers, let layer l take a(l, k) seconds on
// devices of kind k, let t(k) be the sum over all layers, and let x(l, r) be
// the part of l on rank r. The longest busy(r) is no less than the mean with
// weights w(r) = 1 / t(kind of r), which is the sum over r and l of w(r) x(l,
// r) a(l, r), divided by the sum of w. That is no less than
//
//    sum over l of the least a(l, k) / t(k), divided by
//    the sum over r of 1 / t(kind of r).
//
// Gradients and optimizer after the last microbatch, and transfers between
// stages, count as nothing, since they only add. Recompute is part of backward.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "echelon/cost/distinct_pipelines.h"
#include "echelon/planner/search.h"
#include "echelon/planner/search_space.h"

namespace echelon::planner {

/// Seconds of a microbatch through each layer, on each kind of device.
class LayerTimes {
 public:
  /// Sums over the first blocks (of counted models: layers); [0] is 0.
  struct Sums {
    std::vector<double> forward, both;  // both: backward too
    std::array<std::vector<double>, cost::kRecomputes.size()>
        again;  // by Recompute
    /// The embedding and the head, which are not blocks.
    double first_forward = 0, first_both = 0, last_both = 0;

    double total() const { return first_both + both.back() + last_both; }
  };

  explicit LayerTimes(const SearchJob& job) : job_(job) {}
  /// The sums on `rank` of a pipeline that begins at `first_rank`, for
  /// microbatches of `samples`. `kind` is the rank's group of nodes.
  const Sums&
  of(const cost::Strategy& group, int64_t samples, int64_t first_rank,
     int64_t rank, int64_t kind);

 private:
  using Key = std::tuple<
      int64_t, int64_t, int64_t, bool, int64_t, int64_t, int64_t, bool,
      ContextWay, int64_t, int64_t>;
  Sums compute(
      const cost::Strategy& group, int64_t samples, int64_t first_rank,
      int64_t rank) const;

  const SearchJob& job_;
  std::map<Key, Sums> sums_;
};

/// Lower bounds for one group of strategies (search_space.h).
class PipelineBound {
 public:
  PipelineBound(
      const SearchJob& job, LayerTimes& times, const cost::Strategy& group);

  /// The bound for every variant, whatever its stages.
  double any_partition() const { return any_partition_; }
  /// The bound with the stages of this variant and its recompute. For models of
  /// counted layers it is any_partition().
  double of(const cost::Strategy& variant) const;

  /// distinct_pipelines() of each variant.
  const std::vector<cost::PipelinePlace>& places() const { return places_; }

 private:
  /// The sums of a pipeline, by rank.
  using Ranks = std::vector<const LayerTimes::Sums*>;

  const cost::ModelShape* model_;
  std::vector<cost::PipelinePlace> places_;
  std::vector<Ranks> pipelines_;  // distinct ones
  double microbatches_ = 0;
  double any_partition_ = 0;
};

/// Bounds steps by those already timed. Strategies that differ only in what the
/// data-parallel ranks do alone share the pipeline's part of a step, which is
/// learned from the first of them.
class PipelineTimes {
 public:
  /// The least time of a step; 0 before any was learned.
  double at_least(const cost::Strategy& strategy) const;
  /// `plain`: with nothing done to save memory.
  void learn(const Candidate& plain);

 private:
  struct Key {
    std::array<int64_t, 9> numbers;  // degrees, microbatch, stages, context
    bool sequence_parallel;
    AxisOrder order;
    ScheduleKind schedule;
    std::vector<int64_t> stage_layers, rank_microbatch;
    auto operator<=>(const Key&) const = default;
  };
  static Key key_of(const cost::Strategy& strategy);

  std::map<Key, double> seconds_;
};

}  // namespace echelon::planner
