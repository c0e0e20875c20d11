// What the ranks of a pipeline take: passes through their layers, and the
// collectives of their parameters and gradients that computation does not hide.
//
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054 (stages of ZeRO);
// overlap.h.
#pragma once

#include <array>
#include <vector>

#include "echelon/cost/framework.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation_time.h"

namespace echelon {

/// The pipeline whose times are asked for.
struct StageContext {
  const ModelShape& model;
  const Strategy& strategy;
  const Cluster& cluster;
  const Framework& framework;
  int64_t first_rank = 0;       // of the pipeline
  int64_t pipeline_stride = 1;  // ranks between neighbours of pp

  int64_t rank_of(int64_t pipeline_rank) const {
    return first_rank + pipeline_rank * pipeline_stride;
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
    const Node* node = nullptr;
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

/// Seconds of a step, and those during which the rank is blocked or slowed.
struct Exposed {
  double all = 0;
  double exposed = 0;
};

struct ParameterTimes {
  Exposed gradients;   // summing them
  Exposed parameters;  // all-gathers of what ZeRO shards
};

/// Of a step of `rank`, which has these layers.
ParameterTimes parameter_times(
    const StageContext& context, PassTimes& passes, const Layers& layers,
    int64_t rank);

/// Elements of these layers that the rank's optimizer updates.
double
own_elements(const StageContext& context, const Layers& layers, int64_t rank);

}  // namespace echelon
