// Every collective takes a start, a delay for each hop, and its bytes over the
// rate of the narrowest link of its ring, as in NCCL. A group inside a node has
// the node's links; one across nodes also drives the adapters of the devices
// that it has in a node, as far as other groups leave them. An all-reduce takes
// the fastest of ring, tree over the nodes, and sums in the switch. `fill` is
// the time until the links are full; a small message takes only a part of it.
#include "echelon/cost/collective_time.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "echelon/cost/model_shape.h"

namespace echelon::cost {
namespace {

constexpr std::array<std::string_view, 6> kNames = {
    "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "broadcast",  "send"};

/// Rate and delays of the way that a group's messages take.
struct Way {
  double bytes_per_second = 0;  // of one rank, one direction, large messages
  double start_seconds = 0;
  double fill_seconds = 0;
  double fill_bytes = 1;
};

Way inside_way(
    const GroupPlace& place, const cluster::Node& node,
    const DeviceRates& rates) {
  const double n = as_double(place.ranks_per_node);
  double rate = node.inside.bytes_per_second * rates.ring_share * n /
                (n + rates.ring_ramp);
  // A bus is shared by all: the messages of a node's groups cross it one after
  // the other.
  if (!node.switched) rate /= std::max<double>(1, as_double(place.sharing));
  return {
      rate, rates.start_seconds + node.inside.latency_seconds,
      rates.fill_seconds, rates.fill_bytes};
}

double network_rate(
    const GroupPlace& place, const cluster::Node& node,
    const cluster::Cluster& cluster, const DeviceRates& rates) {
  double rate = node.network.bytes_per_second * rates.network_share;
  // A group drives the adapters of the devices that it has in a node, at most
  // its share of all.
  const double adapters = std::min(
      as_double(place.ranks_per_node),
      as_double(node.num_devices) /
          as_double(std::max<int64_t>(1, place.sharing)));
  rate *= std::max(adapters, 1e-9);
  if (place.across_racks) rate /= std::max(1.0, cluster.oversubscription);
  return rate;
}

/// Along the ring, or the pair, of a group.
Way way_of(
    const GroupPlace& place, const cluster::Node& node,
    const cluster::Cluster& cluster, const DeviceRates& rates) {
  Way way = inside_way(place, node, rates);
  if (place.nodes <= 1) return way;
  const double network = network_rate(place, node, cluster, rates);
  way.bytes_per_second = place.ranks_per_node > 1
                             ? std::min(way.bytes_per_second, network)
                             : network;
  way.start_seconds += node.network.latency_seconds;
  way.fill_seconds = rates.network_fill_seconds;
  return way;
}

double fill(const Way& way, double bytes) {
  return way.fill_seconds * bytes / (bytes + way.fill_bytes);
}

/// Delay of `rounds` times around the ring.
double ring_delay(
    double rounds, const GroupPlace& place, const cluster::Node& node,
    const DeviceRates& rates) {
  const double between = as_double(place.nodes > 1 ? place.nodes : 0);
  const double all = as_double(place.ranks - 1);
  const double inside = std::max(0.0, all - between);
  return rounds * (inside * rates.hop_seconds +
                   std::min(between, all) *
                       (rates.hop_seconds + node.network.latency_seconds));
}

/// The delay up and down a tree over the nodes, with a chain inside each
/// (NCCL's double tree).
double tree_delay(
    const GroupPlace& place, const cluster::Node& node,
    const DeviceRates& rates) {
  const double levels = std::ceil(std::log2(as_double(place.nodes)));
  return 2 * (levels * (rates.hop_seconds + node.network.latency_seconds) +
              as_double(place.ranks_per_node - 1) * rates.hop_seconds);
}

double all_reduce_seconds(
    double bytes, const GroupPlace& place, const cluster::Node& node,
    const cluster::Cluster& cluster) {
  const DeviceRates& rates = rates_of(node.device);
  const double n = as_double(place.ranks);
  const Way way = way_of(place, node, cluster, rates);
  const double wire = 2 * (n - 1) / n * bytes;
  const double ring =
      ring_delay(2, place, node, rates) + wire / way.bytes_per_second;
  double best = ring;
  if (place.nodes > 1) {
    // Every byte goes up and down once, and crosses the adapters as in a ring.
    best = std::min(
        best,
        tree_delay(place, node, rates) + 2 * bytes / way.bytes_per_second);
  } else if (node.reduces_in_switch && place.ranks > 3) {
    best = std::min(
        best, 2 * rates.hop_seconds +
                  wire / (node.inside.bytes_per_second * rates.switch_share *
                          std::min(1.0, 0.62 + 0.38 * n / 8)));
  }
  return way.start_seconds + fill(way, bytes) + best;
}

double all_to_all_seconds(
    double bytes, const GroupPlace& place, const cluster::Node& node,
    const cluster::Cluster& cluster) {
  const DeviceRates& rates = rates_of(node.device);
  const double n = as_double(place.ranks);
  const double here = as_double(place.ranks_per_node);
  GroupPlace inside = place;
  inside.nodes = 1;
  const Way near = inside_way(inside, node, rates);
  double seconds =
      near.start_seconds + (here - 1) / n * bytes / near.bytes_per_second;
  if (place.nodes > 1) {
    // Each rank sends through the adapter of its own device.
    const double rate = network_rate(place, node, cluster, rates) / here;
    seconds =
        std::max(seconds, near.start_seconds + (n - here) / n * bytes / rate) +
        node.network.latency_seconds;
  }
  return seconds + fill(near, bytes / n);
}

double send_seconds(
    double bytes, const GroupPlace& place, const cluster::Node& node,
    const cluster::Cluster& cluster, const Framework& framework) {
  const DeviceRates& rates = rates_of(node.device);
  if (place.nodes <= 1) {
    return rates.start_seconds + node.inside.latency_seconds +
           bytes / (node.inside.bytes_per_second * rates.ring_share);
  }
  GroupPlace pair = place;
  pair.ranks_per_node = 1;
  return rates.start_seconds + node.network.latency_seconds +
         bytes / (network_rate(pair, node, cluster, rates) *
                  framework.transfer_share);
}

}  // namespace

std::string_view to_string(CollectiveKind kind) {
  return kNames.at(static_cast<size_t>(kind));
}

std::optional<CollectiveKind> collective_kind(std::string_view name) {
  const auto at = std::ranges::find(kNames, name);
  if (at == kNames.end()) return std::nullopt;
  return static_cast<CollectiveKind>(at - kNames.begin());
}

GroupPlace place_of(
    const Strategy& strategy, const cluster::Cluster& cluster,
    std::span<const Axis> axes, int64_t rank) {
  const Layout& layout = strategy.layout;
  const bool alone = std::all_of(axes.begin(), axes.end(), [&](Axis axis) {
    return layout.degree(axis) == 1;
  });
  if (alone) return {};
  const cluster::Node& node = cluster.node_of(rank);
  const int64_t devices = node.num_devices;
  GroupPlace place;
  int64_t reach = 1;  // ranks between its first and its last
  int64_t stride = 1;
  for (auto axis = layout.order.rbegin(); axis != layout.order.rend(); ++axis) {
    const int64_t degree = layout.degree(*axis);
    if (degree == 1) continue;
    if (std::find(axes.begin(), axes.end(), *axis) != axes.end()) {
      place.ranks *= degree;
      place.ranks_per_node *=
          std::max<int64_t>(1, std::min(degree, devices / stride));
      reach += (degree - 1) * stride;
    }
    stride *= degree;
  }
  place.ranks_per_node = std::min(place.ranks_per_node, place.ranks);
  place.nodes = (place.ranks + place.ranks_per_node - 1) / place.ranks_per_node;
  const int64_t used = std::min(devices, stride);
  place.sharing = std::max<int64_t>(1, used / place.ranks_per_node);
  place.across_racks =
      cluster.nodes_per_rack > 0 && reach > cluster.nodes_per_rack * devices;
  return place;
}

GroupPlace place_of(
    const Strategy& strategy, const cluster::Cluster& cluster, Axis axis,
    int64_t rank) {
  return place_of(strategy, cluster, std::span(&axis, 1), rank);
}

GroupPlace place_of_part(
    const Strategy& strategy, const cluster::Cluster& cluster, Axis axis,
    int64_t members, int64_t apart, int64_t rank) {
  if (members <= 1) return {};
  const int64_t devices = cluster.node_of(rank).num_devices;
  const int64_t stride = strategy.layout.stride(axis) * apart;
  GroupPlace place{.ranks = members};
  place.ranks_per_node = std::clamp<int64_t>(devices / stride, 1, members);
  place.nodes = (members + place.ranks_per_node - 1) / place.ranks_per_node;
  const int64_t used = std::min(devices, strategy.layout.num_ranks());
  place.sharing = std::max<int64_t>(1, used / place.ranks_per_node);
  place.across_racks =
      cluster.nodes_per_rack > 0 &&
      (members - 1) * stride + 1 > cluster.nodes_per_rack * devices;
  return place;
}

double collective_seconds(
    CollectiveKind kind, double bytes, const GroupPlace& place,
    const cluster::Node& node, const cluster::Cluster& cluster,
    const Framework& framework) {
  if (place.ranks <= 1 || bytes <= 0) return 0;
  bytes /= framework.collective_share;
  switch (kind) {
    case CollectiveKind::all_reduce:
      return all_reduce_seconds(bytes, place, node, cluster);
    case CollectiveKind::all_to_all:
      return all_to_all_seconds(bytes, place, node, cluster);
    case CollectiveKind::send:
      return send_seconds(bytes, place, node, cluster, framework);
    case CollectiveKind::all_gather:
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::broadcast:
      break;
  }
  const DeviceRates& rates = rates_of(node.device);
  const Way way = way_of(place, node, cluster, rates);
  const double n = as_double(place.ranks);
  return way.start_seconds + fill(way, bytes) +
         ring_delay(1, place, node, rates) +
         (n - 1) / n * bytes / way.bytes_per_second;
}

double transfer_seconds(
    const Strategy& strategy, const cluster::Cluster& cluster,
    const Framework& framework, double bytes, int64_t sender,
    int64_t receiver) {
  if (sender == receiver || bytes <= 0) return 0;
  const bool near = cluster.node_index(sender) == cluster.node_index(receiver);
  const cluster::Node& node = cluster.node_of(sender);
  const GroupPlace pair{
      .ranks = 2,
      .ranks_per_node = near ? 2 : 1,
      .nodes = near ? 1 : 2,
      .sharing = std::min(node.num_devices, strategy.layout.stride(Axis::pp))};
  const int64_t tp = strategy.layout.tp;
  const bool scatters = framework.scatters_transfers && tp > 1 && !near &&
                        !strategy.sequence_parallel;
  if (!scatters) {
    return collective_seconds(
        CollectiveKind::send, bytes, pair, node, cluster, framework);
  }
  return collective_seconds(
             CollectiveKind::send, bytes / as_double(tp), pair, node, cluster,
             framework) +
         collective_seconds(
             CollectiveKind::all_gather, bytes,
             place_of(strategy, cluster, Axis::tp, sender), node, cluster,
             framework);
}

}  // namespace echelon::cost
