#include "echelon/simulator/traffic_axes.h"

#include <algorithm>
#include <span>

#include "echelon/cost/state_bytes.h"

namespace echelon::simulator {
namespace {

AxisMask only_split(AxisMask axes, const Layout& layout) {
  for (const Axis axis : kAxes) {
    if (layout.degree(axis) == 1) axes &= static_cast<AxisMask>(~mask_of(axis));
  }
  return axes;
}

void add_axes(std::vector<AxisMask>& all, AxisMask axes) {
  if (axes == 0 || std::find(all.begin(), all.end(), axes) != all.end()) return;
  all.push_back(axes);
}

}  // namespace

Sharing sharing_of(const Strategy& strategy, bool experts) {
  const SharingAxes axes =
      sharing_axes(strategy, find_framework(strategy.stack), experts);
  const auto split = [&](std::span<const Axis> list) {
    AxisMask mask = 0;
    for (const Axis axis : list) mask |= mask_of(axis);
    return only_split(mask, strategy.layout);
  };
  return {split(axes.shards), split(axes.copies)};
}

std::vector<AxisMask> launched_axes(const Strategy& strategy) {
  std::vector<AxisMask> all;
  for (const bool experts : {false, true}) {
    const Sharing sharing = sharing_of(strategy, experts);
    add_axes(all, sharing.shards);
    add_axes(all, sharing.copies);
  }
  return all;
}

std::vector<AxisMask> traffic_axes(const Strategy& strategy, bool tied) {
  std::vector<AxisMask> all = launched_axes(strategy);
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep}) {
    add_axes(all, only_split(mask_of(axis), strategy.layout));
  }
  if (tied) add_axes(all, mask_of(Axis::pp));
  return all;
}

Axis reported_axis(AxisMask axes, const Layout& layout) {
  for (const Axis axis :
       {Axis::dp_shard, Axis::dp_replicate, Axis::cp, Axis::ep, Axis::tp,
        Axis::pp}) {
    if ((axes & mask_of(axis)) && layout.degree(axis) > 1) return axis;
  }
  return Axis::tp;
}

}  // namespace echelon::simulator
