// How a model and a batch are spread over ranks: the degree of each mesh axis,
// and their order.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

/// The mesh axes in their default order, outermost first. Neighbours in `tp`
/// are neighbours in rank, so the axis with the most traffic uses the fastest
/// links, and replicas of the model, which communicate once a step, are on
/// different hosts.
enum class Axis : uint8_t { dp_replicate, dp_shard, pp, cp, ep, tp };

/// Every axis once, outermost first.
using AxisOrder = std::array<Axis, 6>;

inline constexpr AxisOrder kAxes = {
    Axis::dp_replicate, Axis::dp_shard, Axis::pp, Axis::cp, Axis::ep, Axis::tp};

/// The axis' name as configurations spell it, "dp_replicate".
std::string_view to_string(Axis axis);

/// The axis' name as layouts spell it: "dp" is dp_replicate, "fsdp" is
/// dp_shard.
std::string_view short_name(Axis axis);
/// The same by either name of an axis; any other text as it is.
std::string_view short_axis_name(std::string_view axis);

/// The degrees. 1 leaves an axis out. Their product is the number of ranks.
struct Layout {
  int64_t dp_replicate = 1;  // replicas of the model, each with its own samples
  int64_t dp_shard = 1;      // data parallel with sharded parameters (ZeRO)
  int64_t cp = 1;            // shards of the sequence
  int64_t tp = 1;            // shards of each layer's matrices
  int64_t pp = 1;            // partitions of the list of layers
  int64_t ep = 1;            // ranks among which experts are spread
  /// Outermost first: ranks that differ in the last axis alone are neighbours.
  AxisOrder order = kAxes;

  int64_t degree(Axis axis) const;
  int64_t num_ranks() const;
  /// The distance in rank of neighbours along `axis`: the product of the
  /// degrees inside it.
  int64_t stride(Axis axis) const;
  /// dp_replicate * dp_shard: ranks that see different samples and have the
  /// same experts.
  int64_t data_degree() const { return dp_replicate * dp_shard; }
  /// Ranks that see different samples: those among which experts are spread
  /// each have their own too.
  int64_t data_ranks() const { return data_degree() * ep; }
  /// The axes of degree above 1, outermost first. The order of others does not
  /// matter.
  std::vector<Axis> used_axes() const;
  /// Ignores the order.
  bool same_degrees(const Layout& other) const;
  /// Whether every rank has the same coordinates: compares the degrees and the
  /// order of the used axes.
  bool operator==(const Layout& other) const;
};

/// "dp=2,tp=4", "dp=2,tp=4,order=tp:dp" -> Layout. `dp` is dp_replicate, `fsdp`
/// is dp_shard; `order` names the axes, outermost first. Throws ConfigError for
/// an unknown or repeated axis, a degree below 1, or an order that leaves out
/// an axis with ranks.
Layout parse_layout(std::string_view text);

/// Layout -> "dp=2,tp=4". Degrees of 1 are omitted ("dp=1" if all are 1), and
/// so is the order if the remaining axes are in the usual one.
std::string to_string(const Layout& layout);

/// Sets the order to `names`, outermost first, by either name of an axis. Axes
/// of degree 1 may be left out. Returns "", or the rule that the names break;
/// the order is then unchanged.
std::string set_order(Layout& layout, const std::vector<std::string>& names);

/// Throws ConfigError unless the degrees' product is `world_size`; the message
/// shows the product and which degree of each axis would fit.
void check_world_size(const Layout& layout, int64_t world_size);

}  // namespace echelon
