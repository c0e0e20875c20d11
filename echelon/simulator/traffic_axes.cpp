#include "echelon/simulator/traffic_axes.h"

#include <algorithm>

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
  AxisMask cut = mask_of(Axis::dp_shard) | mask_of(Axis::cp);
  if (!experts) cut |= mask_of(Axis::ep);
  const AxisMask copies = mask_of(Axis::dp_replicate);
  const Layout& layout = strategy.layout;
  if (strategy.zero_stage == 0) {
    return {0, only_split(cut | copies, layout)};
  }
  return {only_split(cut, layout), only_split(copies, layout)};
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
