// What the ranks of a pipeline take: passes through their layers, and the
// collectives of their parameters and gradients that computation does not hide.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (stages of ZeRO); Li et
// al., "PyTorch Distributed", 2020, arXiv:2006.15704 (gradients, as soon as
// they are ready); Zhao et al., 2023, arXiv:2304.11277 (parameters, one layer
// ahead).
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "echelon/cost/framework.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation_time.h"

namespace echelon::cost {

/// The pipeline whose times are asked for.
struct StageContext {
  const ModelShape& model;
  const Strategy& strategy;
  const cluster::Cluster& cluster;
  const Framework& framework;
  int64_t first_rank = 0;       // of the pipeline
  int64_t pipeline_stride = 1;  // ranks between neighbours of pp

  int64_t rank_of(int64_t pipeline_rank) const {
    return first_rank + pipeline_rank * pipeline_stride;
  }
  /// Seconds of a collective that `rank` takes part in.
  double seconds_of(
      CollectiveKind kind, double bytes, const GroupPlace& place,
      int64_t rank) const {
    return collective_seconds(
        kind, bytes, place, cluster.node_of(rank), cluster, framework);
  }
};

/// The layers of a rank, in order.
using Layers = std::vector<const LayerWork*>;

/// Seconds of passes, each computed once: equal layers take the same time on
/// ranks that are placed alike.
class PassTimes {
 public:
  explicit PassTimes(const StageContext& context) : context_(context) {}

  /// Valid until the next call.
  const PassSeconds&
  of(const LayerWork& layer, int64_t rank, Operations LayerWork::*pass);
  PassSeconds
  of(const Layers& layers, int64_t rank, Operations LayerWork::*pass);

 private:
  struct Place {
    const cluster::Node* node = nullptr;
    std::array<GroupPlace, 3> groups;
    bool operator==(const Place&) const = default;
  };
  struct Entry {
    int64_t kind = 0;
    Operations LayerWork::*pass = nullptr;
    size_t place = 0;
    PassSeconds seconds;
  };

  /// The number of the first place that equals the rank's.
  size_t place(int64_t rank);

  const StageContext& context_;
  std::vector<Place> places_;
  std::vector<Entry> entries_;
  int64_t last_rank_ = -1;
  size_t last_place_ = 0;
};

// Collectives that overlap with the computation of layers, in the order of a
// pass
// -----------------------------------------------------------------------------

/// Each layer's collective begins when the layer has computed and the previous
/// collective has ended: gradients in a backward pass.
class TrailingCollectives {
 public:
  /// `repeat` equal layers, of these seconds each. Either the first or the last
  /// of them holds up the rest.
  void add(double computation, double communication, int64_t repeat = 1) {
    const double n = as_double(repeat);
    over_ = std::max(
        {over_ + n * communication, computed_ + computation + n * communication,
         computed_ + n * computation + communication});
    computed_ += n * computation;
  }
  /// Seconds from the end of the last layer to that of the last collective.
  double exposed() const { return std::max(0.0, over_ - computed_); }

 private:
  double computed_ = 0;
  double over_ = 0;
};

/// Each layer's collective must end before the layer computes, and runs while
/// the previous layer does: parameters in a forward pass.
class LeadingCollectives {
 public:
  void add(double computation, double communication, int64_t repeat = 1) {
    if (repeat <= 0) return;
    const double n = as_double(repeat);
    exposed_ += std::max(0.0, communication - before_) +
                (n - 1) * std::max(0.0, communication - computation);
    before_ = computation;
  }
  /// Seconds that layers wait.
  double exposed() const { return exposed_; }

 private:
  double before_ = 0;  // seconds of the previous layer
  double exposed_ = 0;
};

/// All collectives start with the pass and follow each other, as the
/// all-gathers of parameters after an update do. Each must end before its layer
/// computes.
class QueuedCollectives {
 public:
  /// `slowdown`: the share of a collective's hidden time by which it slows the
  /// computation that hides it.
  explicit QueuedCollectives(double slowdown) : slowdown_(slowdown) {}

  /// `repeat` equal layers, of these seconds each.
  void add(double computation, double communication, int64_t repeat = 1) {
    for (int64_t i = 0; i < repeat; ++i) {
      there_ += communication;
      const double waits = std::max(0.0, there_ - now_);
      const double lost =
          waits + slowdown_ * std::max(0.0, communication - waits);
      lost_ += lost;
      now_ += lost + computation;
    }
  }
  /// Seconds by which the pass is longer.
  double exposed() const { return lost_; }

 private:
  double slowdown_;
  double now_ = 0;
  double there_ = 0;  // end of the last collective so far
  double lost_ = 0;
};

/// Seconds of a step, and those during which the rank is blocked or slowed.
struct Exposed {
  double all = 0;
  double exposed = 0;
};

struct ParameterTimes {
  Exposed gradients;   // summing them
  Exposed parameters;  // all-gathers of what ZeRO shards
};

/// Times of the collectives of a step of `rank`, which has these layers.
ParameterTimes parameter_times(
    const StageContext& context, PassTimes& passes, const Layers& layers,
    int64_t rank);

/// Elements of these layers that the rank's optimizer updates.
double
own_elements(const StageContext& context, const Layers& layers, int64_t rank);

}  // namespace echelon::cost
