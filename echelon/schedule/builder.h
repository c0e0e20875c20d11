// What the generators share: where stages live, and a rank's list in the
// making.
#pragma once

#include <array>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon::detail {

/// An empty schedule in which rank r holds the stages r, r + p, r + 2p …
Schedule
looped(const char* name, int32_t ranks, int32_t microbatches, int32_t per_rank);

/// An empty schedule of two stages a rank in the shape of a V: rank r holds the
/// stages r and 2p - 1 - r, so the last rank passes on to itself.
Schedule folded(const char* name, int32_t ranks, int32_t microbatches);

/// Writes one rank's list. Each call adds the next microbatch of its kind for
/// the rank's `local`-th stage, counted from 0 in ascending order. Microbatches
/// past the last are counted but not written: a generator may thus write the
/// schedule of more microbatches than there are, and what remains is in order.
class RankBuilder {
 public:
  RankBuilder(Schedule& schedule, int32_t rank);
  ~RankBuilder() { actions_.shrink_to_fit(); }
  RankBuilder(const RankBuilder&) = delete;
  RankBuilder& operator=(const RankBuilder&) = delete;

  void forward(int32_t local) { add(ActionKind::forward, local); }
  void backward(int32_t local) { add(ActionKind::backward, local); }
  void backward_input(int32_t local) { add(ActionKind::backward_input, local); }
  void backward_weight(int32_t local) {
    add(ActionKind::backward_weight, local);
  }
  /// How many were added of `kind`; B counts as I and as W too.
  int32_t count(ActionKind kind, int32_t local) const;

 private:
  using Counts = std::array<int32_t, 4>;
  void add(ActionKind kind, int32_t local);

  std::vector<Action>& actions_;
  std::vector<int32_t> stages_;
  std::vector<Counts> counts_;
  int32_t num_microbatches_;
};

}  // namespace echelon::detail
