#include "echelon/cost/sharing_axes.h"

namespace echelon {
namespace {

// Without ep, their last one, they are those of experts.
constexpr Axis kAll[] = {
    Axis::dp_replicate, Axis::dp_shard, Axis::cp, Axis::ep};
constexpr Axis kWithCp[] = {Axis::dp_shard, Axis::cp, Axis::ep};
constexpr Axis kWithoutCp[] = {Axis::dp_shard, Axis::ep};

// Of what is cut; the second one where ranks of cp do not cut.
constexpr Axis kCopies[] = {Axis::dp_replicate, Axis::cp};

}  // namespace

SharingAxes
sharing_axes(const Strategy& strategy, const Stack& stack, bool experts) {
  const auto of = [&](std::span<const Axis> axes) {
    return experts ? axes.first(axes.size() - 1) : axes;
  };
  if (strategy.zero_stage == 0) return {.shards = {}, .copies = of(kAll)};
  const std::span<const Axis> copies = kCopies;
  if (stack.memory.shards_over_cp) {
    return {.shards = of(kWithCp), .copies = copies.first(1)};
  }
  return {.shards = of(kWithoutCp), .copies = copies};
}

}  // namespace echelon
