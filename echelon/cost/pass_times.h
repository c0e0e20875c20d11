// Passes through the layers of a pipeline's ranks.
#pragma once

#include <array>
#include <vector>

#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation_time.h"
#include "echelon/cost/stack.h"

namespace echelon {

/// A pipeline that is timed.
struct StageContext {
  const ModelShape& model;
  const Strategy& strategy;
  const Cluster& cluster;
  const Stack& stack;
  int64_t first_rank = 0;       // of the pipeline
  int64_t pipeline_stride = 1;  // ranks between neighbours of pp

  int64_t rank_of(int64_t pipeline_rank) const {
    return first_rank + pipeline_rank * pipeline_stride;
  }
};

/// Of a rank, in order.
using Layers = std::vector<const LayerWork*>;

/// Each timed once: what is alike on ranks that are placed alike takes as long.
class PassTimes {
 public:
  explicit PassTimes(const StageContext& context) : context_(context) {}

  /// Until it is asked again.
  const PassSeconds&
  of(const LayerWork& layer, int64_t rank, Operations LayerWork::*pass);
  PassSeconds
  of(const Layers& layers, int64_t rank, Operations LayerWork::*pass);

 private:
  struct Place {
    const Node* node = nullptr;
    std::array<GroupPlace, 3> groups;
  };
  struct Entry {
    int64_t kind = 0;
    Operations LayerWork::*pass = nullptr;
    size_t place = 0;
    PassSeconds seconds;
  };

  /// The number of the first place like the rank's.
  size_t place(int64_t rank);

  const StageContext& context_;
  std::vector<Place> places_;
  std::vector<Entry> entries_;
  int64_t last_rank_ = -1;
  size_t last_place_ = 0;
};

}  // namespace echelon
