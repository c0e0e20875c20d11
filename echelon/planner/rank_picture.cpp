#include "echelon/planner/rank_picture.h"

#include <algorithm>
#include <array>
#include <set>

#include "echelon/report/page.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::planner {
namespace {

constexpr int64_t kMostDrawnNodes = 16;
constexpr int64_t kMostDrawnDevices = 144;
constexpr int64_t kSquare = 20;  // pixels of a device, with its gap

// A node's ranks; the last node of a plan may be used in part.
struct NodeRanks {
  int64_t first = 0;
  int64_t count = 0;
};

std::vector<NodeRanks>
node_ranks(const cluster::Cluster& cluster, int64_t num_ranks) {
  std::vector<NodeRanks> nodes;
  int64_t first = 0;
  for (const auto& group : cluster.groups) {
    for (int64_t i = 0; i < group.count && first < num_ranks; ++i) {
      nodes.push_back(
          {first, std::min(group.node.num_devices, num_ranks - first)});
      first += nodes.back().count;
    }
  }
  return nodes;
}

int64_t coordinate_of(const Layout& layout, Axis axis, int64_t rank) {
  return rank / layout.stride(axis) % layout.degree(axis);
}

// Whether a rank differs from rank 0 along this axis alone, or not at all.
bool shares(const Layout& layout, Axis axis, int64_t rank) {
  return std::ranges::all_of(layout.used_axes(), [&](Axis other) {
    return other == axis || coordinate_of(layout, other, rank) == 0;
  });
}

std::string what_is_shared(const cost::Strategy& strategy, Axis axis) {
  switch (axis) {
    case Axis::tp:
      return "compute each layer together";
    case Axis::pp:
      return "hold the stages of one pipeline";
    case Axis::cp:
      return "hold parts of the same sequences";
    case Axis::ep:
      return "hold different experts";
    case Axis::dp_replicate:
      return "hold the same parameters and take different samples";
    case Axis::dp_shard:
      break;
  }
  return strategy.zero_stage >= 3
             ? "hold shards of the same parameters, gradients and optimizer "
               "state"
         : strategy.zero_stage == 2
             ? "hold shards of the same gradients and optimizer state"
             : "hold shards of the same optimizer state";
}

// The nodes with ranks of rank 0's group, ascending.
std::vector<size_t> nodes_of_group(
    const Layout& layout, const std::vector<NodeRanks>& nodes, Axis axis) {
  std::set<size_t> used;
  for (int64_t i = 0; i < layout.degree(axis); ++i) {
    const int64_t rank = i * layout.stride(axis);
    const auto after =
        std::ranges::upper_bound(nodes, rank, std::less<>(), &NodeRanks::first);
    used.insert(static_cast<size_t>(after - nodes.begin()) - 1);
  }
  return {used.begin(), used.end()};
}

// The first nodes; where the group reaches farther, its own.
std::vector<size_t>
drawn_nodes(const std::vector<size_t>& group, size_t num_nodes, size_t most) {
  std::vector<size_t> drawn;
  if (group.back() >= most) {
    drawn.assign(
        group.begin(), group.begin() + static_cast<std::ptrdiff_t>(
                                           std::min(most, group.size())));
    return drawn;
  }
  for (size_t i = 0; i < std::min(most, num_nodes); ++i) drawn.push_back(i);
  return drawn;
}

std::string group_text(
    const cost::Strategy& strategy, Axis axis, size_t num_nodes, size_t drawn) {
  std::string text = format(
      "{} ranks {}; they are in {}", format_count(strategy.layout.degree(axis)),
      what_is_shared(strategy, axis),
      num_nodes == 1
          ? "one node"
          : format_count(static_cast<int64_t>(num_nodes)) + " nodes");
  if (drawn < num_nodes) text += format(", of which {} are drawn", drawn);
  return text;
}

std::string rank_title(const Layout& layout, int64_t rank) {
  std::string text;
  for (const Axis axis : layout.used_axes()) {
    text += format(
        "{} {} {}", text.empty() ? ":" : ",", short_name(axis),
        coordinate_of(layout, axis, rank));
  }
  return format("rank {}{}", rank, text);
}

void draw_node(
    report::Markup& page, const Layout& layout, const NodeRanks& node,
    size_t index, Axis axis, const char* color) {
  const int64_t count = std::min(node.count, kMostDrawnDevices);
  const int64_t columns = count <= 8 ? std::min<int64_t>(count, 4) : 12;
  const int64_t rows = (count + columns - 1) / columns;
  const std::string name = node.count == 1
                               ? format("node {}: rank {}", index, node.first)
                               : format(
                                     "node {}: {} to {}", index, node.first,
                                     node.first + node.count - 1);
  page.add(
      "<div class='shard-item node'><svg role='img' aria-label='{}' width='{}' "
      "height='{}'>",
      name, std::min<int64_t>(columns, count) * kSquare, rows * kSquare);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rank = node.first + i;
    page.add(
        "<rect class='{}' x='{}' y='{}' width='{}' height='{}'>"
        "<title>{}</title></rect>",
        shares(layout, axis, rank) ? color : "kw", i % columns * kSquare + 1,
        i / columns * kSquare + 1, kSquare - 2, kSquare - 2,
        rank_title(layout, rank));
  }
  page.add("</svg><p>{}</p></div>", name);
}

}  // namespace

void draw_rank_groups(
    report::Markup& page, const cluster::Cluster& cluster, const Plan& plan) {
  constexpr std::array<const char*, 6> colors = {"k0", "k1", "k2",
                                                 "k3", "k5", "k6"};
  const Layout& layout = plan.strategy.layout;
  auto axes = layout.used_axes();
  if (axes.empty()) return;
  std::ranges::reverse(axes);
  const auto nodes = node_ranks(cluster, layout.num_ranks());
  const auto most = static_cast<size_t>(std::clamp<int64_t>(
      kMostDrawnDevices / std::max<int64_t>(1, nodes[0].count), 1,
      kMostDrawnNodes));
  page.add("<h2>Which ranks share what</h2><p class='finding'>");
  page.add("Each square is a device. The group of rank 0 is in colour.");
  if (most < nodes.size()) {
    page.add(
        " A picture has the first {} of {} nodes; where a group reaches "
        "farther, the nodes of the group.",
        most, format_count(static_cast<int64_t>(nodes.size())));
  }
  page.add("</p>");
  for (size_t i = 0; i < axes.size(); ++i) {
    const std::string name(short_name(axes[i]));
    const auto group = nodes_of_group(layout, nodes, axes[i]);
    const auto drawn = drawn_nodes(group, nodes.size(), most);
    page.add("<figure class='shard-layer' id='ranks-{}'><figcaption>", name);
    report::draw_caption(
        page, format("{}={}", name, layout.degree(axes[i])),
        group_text(plan.strategy, axes[i], group.size(), drawn.size()));
    page.add("</figcaption><div class='shard-flow'>");
    for (const size_t index : drawn) {
      draw_node(page, layout, nodes[index], index, axes[i], colors[i]);
    }
    page.add("</div></figure>");
  }
}

}  // namespace echelon::planner
