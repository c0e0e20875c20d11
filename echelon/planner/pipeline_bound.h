// What a step takes at least, by what each rank of a pipeline computes.
//
// A rank r computes forward and backward of each of the m microbatches through
// its stages: m busy(r) seconds. Let s be the lowest of its stages.
// 1. It begins when a first microbatch has come through the stages below s,
// which lie
//    on other ranks.
// 2. Where schedules do not split backward, its last action is a backward
// through s (a
//    higher stage of the microbatch would be followed by s), and the stages
//    below s follow.
// So no schedule ends before
//    sum of forward (2.: and backward) of the stages below s + m busy(r),
// and a step takes as long as its slowest pipeline. For every way to cut n
// layers, of which layer l takes a(l, k) seconds on devices of kind k and t(k)
// is the sum of all: with x(l, r) for the part of l that r has, the longest
// busy(r) is no less than the mean with weights w(r) = 1 / t(kind of r), sum
// over r and l of w(r) x(l, r) a(l, r) over the sum of w, and that no less than
//    sum over l of the least a(l, k) / t(k), over the sum over r of 1 / t(kind
//    of r).
// What follows the last microbatch (gradients, optimizer) and transfers between
// stages count as nothing; they only add. What is computed again is part of
// backward.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "echelon/cost/distinct_pipelines.h"
#include "echelon/planner/search_space.h"

namespace echelon {

/// Seconds of a microbatch through each layer, on each kind of device.
class LayerTimes {
 public:
  /// Sums over blocks (of counted models: layers) from the first one on; [0] is
  /// 0.
  struct Sums {
    std::vector<double> forward, both;  // both: backward too
    std::array<std::vector<double>, kRecomputes.size()> again;  // by Recompute
    /// Of what is no block: the embedding, and the head.
    double first_forward = 0, first_both = 0, last_both = 0;

    double total() const { return first_both + both.back() + last_both; }
  };

  explicit LayerTimes(const SearchJob& job) : job_(job) {}
  /// On `rank` of a pipeline that begins at `first_rank`, with microbatches of
  /// so many samples. `kind`: the group of nodes that the rank is in.
  const Sums&
  of(const Strategy& group, int64_t samples, int64_t first_rank, int64_t rank,
     int64_t kind);

 private:
  using Key = std::tuple<
      int64_t, int64_t, int64_t, bool, int64_t, int64_t, int64_t, bool>;
  Sums compute(
      const Strategy& group, int64_t samples, int64_t first_rank,
      int64_t rank) const;

  const SearchJob& job_;
  std::map<Key, Sums> sums_;
};

/// The bounds of one group of strategies (search_space.h). Every estimate of a
/// variant is at or above them.
class PipelineBound {
 public:
  PipelineBound(const SearchJob& job, LayerTimes& times, const Strategy& group);

  /// Of every variant, whatever its stages.
  double any_cut() const { return any_cut_; }
  /// With the stages of this one, and what it computes again to save memory. Of
  /// models of counted layers: any_cut().
  double of(const Strategy& variant) const;

  /// distinct_pipelines() of each variant.
  const std::vector<PipelinePlace>& places() const { return places_; }

 private:
  /// Of a pipeline, by rank.
  using Ranks = std::vector<const LayerTimes::Sums*>;

  const ModelShape* model_;
  std::vector<PipelinePlace> places_;
  std::vector<Ranks> pipelines_;  // that are not alike
  double microbatches_ = 0;
  double any_cut_ = 0;
};

}  // namespace echelon
