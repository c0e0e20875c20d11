// How a model and a batch are cut: the degree of each mesh axis.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

/// The mesh axes, outermost first: neighbours in `tp` are neighbours in rank,
/// so the axis with the most traffic runs over the fastest links, and copies of
/// the model, which talk once a step, lie on different hosts.
enum class Axis { dp_replicate, dp_shard, pp, cp, ep, tp };

inline constexpr std::array<Axis, 6> kAxes = {
    Axis::dp_replicate, Axis::dp_shard, Axis::pp,
    Axis::cp,           Axis::ep,       Axis::tp};

/// The axis' name as configurations spell it, "dp_replicate".
std::string_view to_string(Axis axis);

/// The degrees. 1 leaves an axis out. Their product is the number of ranks.
struct Layout {
  int64_t dp_replicate = 1;  // copies of the model, each with its own samples
  int64_t dp_shard = 1;      // data parallel with parameters cut (ZeRO)
  int64_t cp = 1;            // the sequence is cut
  int64_t tp = 1;            // each layer's matrices are cut
  int64_t pp = 1;            // the list of layers is cut
  int64_t ep = 1;            // experts are spread

  int64_t degree(Axis axis) const;
  int64_t num_ranks() const;
  /// Ranks that see different samples: dp_replicate * dp_shard.
  int64_t data_degree() const { return dp_replicate * dp_shard; }
  bool operator==(const Layout&) const = default;
};

/// "dp=2,tp=4" -> Layout. `dp` is dp_replicate, `fsdp` is dp_shard. Throws
/// ConfigError for an unknown or repeated axis or a degree below 1.
Layout parse_layout(std::string_view text);

/// Layout -> "dp=2,tp=4"; "1 rank" degrees are left out ("dp=1" if all are 1).
std::string to_string(const Layout& layout);

/// Throws ConfigError unless the degrees' product is `world_size`; the message
/// shows the product and which degree of each axis would fit.
void check_world_size(const Layout& layout, int64_t world_size);

}  // namespace echelon
