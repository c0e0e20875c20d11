// The collectives of one rank as instructions: along which group, how long, how
// many bytes; of its layers' operations, its parameters and its gradients.
//
// Source: Rajbhandari et al., 2020, arXiv:1910.02054 (which parameters are
// gathered and which gradients reduced).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"
#include "echelon/simulator/rank_grid.h"
#include "echelon/simulator/rank_program.h"

namespace echelon::simulator {

/// Of parameters.
struct Elements {
  double dense = 0;
  double experts = 0;

  Elements& operator+=(const Elements& more) {
    dense += more.dense;
    experts += more.experts;
    return *this;
  }
};
Elements elements_of(const LayerWork& layer);

class RankTraffic {
 public:
  /// `axes`: what Instruction::group counts. All must outlive it.
  RankTraffic(
      const Strategy& strategy, const Cluster& cluster, const Stack& stack,
      const std::vector<AxisMask>& axes, int64_t rank);

  /// Of a tensor of `bytes`; none when no other rank is in the group.
  Instructions collective(
      CollectiveKind kind, AxisMask axes, double bytes,
      const std::string& name);
  /// Of parameters that ZeRO cuts.
  Instructions gathers(const Elements& elements, const std::string& name);
  /// Of gradients; buckets of equal size that follow each other are one
  /// instruction.
  Instructions reductions(const Elements& elements, const std::string& name);

  /// What Instruction::label counts.
  std::vector<std::string> take_labels() { return std::move(labels_); }

 private:
  int32_t label(const std::string& text);
  Instructions
  reductions_of(double bytes, bool experts, const std::string& name);

  const Strategy& strategy_;
  const Cluster& cluster_;
  const Stack& stack_;
  const std::vector<AxisMask>& axes_;
  int64_t rank_;
  int next_bucket_ = 0;
  std::vector<std::string> labels_;
};

}  // namespace echelon::simulator
