#include "echelon/planner/axis_orders.h"

#include <algorithm>
#include <array>

namespace echelon::planner {
namespace {

// The properties of an axis' place in the order on which costs depend, on equal
// nodes (cost/collective_time.h).
struct AxisPlace {
  int64_t near_ranks = 1;  // of a group, within a node
  int64_t stride = 0;      // as far as it matters

  bool operator==(const AxisPlace&) const = default;
};

AxisPlace
place_of(const Layout& layout, Axis axis, const cluster::Cluster& cluster) {
  const int64_t degree = layout.degree(axis);
  if (degree == 1) return {};
  const int64_t devices = cluster.groups.front().node.num_devices;
  const int64_t stride = layout.stride(axis);
  AxisPlace place;
  place.near_ranks = std::clamp<int64_t>(devices / stride, 1, degree);
  if (cluster.nodes_per_rack > 0) {
    place.stride = stride;  // how far a group reaches
  } else if (axis == Axis::pp && devices % (degree * stride) != 0) {
    place.stride = std::min(stride, devices);  // where pipelines cross nodes
  }
  return place;
}

using Places = std::array<AxisPlace, kAxes.size()>;

Places places_of(const Layout& layout, const cluster::Cluster& cluster) {
  Places places;
  for (size_t i = 0; i < kAxes.size(); ++i) {
    places[i] = place_of(layout, kAxes[i], cluster);
  }
  return places;
}

}  // namespace

const std::vector<AxisOrder>& axis_orders() {
  using enum Axis;
  static const std::vector<AxisOrder> orders = {
      kAxes,
      {pp, dp_replicate, dp_shard, cp, ep, tp},
      {dp_replicate, pp, dp_shard, cp, ep, tp},
  };
  return orders;
}

std::vector<int> orders_that_differ(
    const Layout& layout, const std::vector<int>& allowed,
    const cluster::Cluster& cluster) {
  std::vector<int> kept;
  std::vector<Layout> layouts;
  std::vector<Places> places;
  for (const int order : allowed) {
    Layout one = layout;
    one.order = axis_orders()[static_cast<size_t>(order)];
    const Places own = places_of(one, cluster);
    const bool known = cluster.mixed()
                           ? std::ranges::find(layouts, one) != layouts.end()
                           : std::ranges::find(places, own) != places.end();
    if (known) continue;
    kept.push_back(order);
    layouts.push_back(one);
    places.push_back(own);
  }
  return kept;
}

}  // namespace echelon::planner
