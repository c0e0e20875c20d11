// Partitions a list of layers into contiguous slices, one for each pipeline
// stage or device: by balance, within memory, or where the user says. And
// divides whole units, such as the samples of a batch, by weight.
//
//   partition = balance({1, 1, 1, 3}, 2)      // {0, 3, 4}: layers 0 to 2, and
//   3
//
// A partition into k slices is k + 1 boundaries, from 0 to the number of
// layers. Slice i holds the layers partition[i] to partition[i + 1] - 1, at
// least one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace echelon {

/// The limit of a slice that has none.
inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

/// The memory that layers need and that slices have. Slice s needs the sum over
/// its layers of bytes + stored[s] * stored_bytes.
struct SliceMemory {
  std::vector<int64_t> bytes;         // by layer: parameters and their state
  std::vector<int64_t> stored_bytes;  // by layer: activations of a microbatch
                                      // kept for backward; empty: none
  std::vector<int64_t> stored;  // by slice: microbatches kept at once; empty: 1
  std::vector<int64_t> limits;  // by slice, kNoLimit for none; empty: no limits
  std::vector<std::string> names;  // by layer, for messages; may be empty
};

/// The partition whose largest sum of costs is the smallest possible, and
/// fairly even among those. Costs are 0 or more, in any unit.
///
/// At most 40 probes of O(layers * slices), in practice far fewer steps: 6,000
/// layers in 1,024 slices take less than 0.1 s. Throws ConfigError when there
/// are more slices than layers.
std::vector<size_t> balance(const std::vector<double>& costs, size_t slices);

/// The same among the partitions that fit the memory. Throws ConfigError when
/// none fits; the message shows what each slice of the nearest one needs.
///
///   speeds  by slice, above 0: the cost of a slice is the sum over its layers
///           divided by its speed; empty: all are alike
std::vector<size_t> balance(
    const std::vector<double>& costs, size_t slices, const SliceMemory& memory,
    const std::vector<double>& speeds = {});

/// The partition that fills the memory evenly: the largest ratio of need to
/// limit is the smallest possible. A slice without a limit gets the largest
/// limit of the others; without any limit, the largest need is the smallest
/// possible.
/// Throws as balance does.
std::vector<size_t> balance_memory(size_t slices, const SliceMemory& memory);

/// The bytes that each slice of `partition` needs.
std::vector<int64_t>
slice_bytes(const std::vector<size_t>& partition, const SliceMemory& memory);

/// Throws ConfigError unless each slice of `partition` fits its limit.
void check_fits(
    const std::vector<size_t>& partition, const SliceMemory& memory);

/// The partition that begins a new slice at each of the layers `first`: exact
/// names, or the beginnings of dotted ones ("layer2" is the first layer of that
/// name or inside it, such as "layer2.0"). There is one name fewer than slices,
/// since the first slice begins with the first layer. Throws ConfigError for
/// names that are unknown, repeated, out of order or of the wrong number.
std::vector<size_t> partition_at(
    const std::vector<std::string>& names,
    const std::vector<std::string>& first, size_t slices);

/// Divides `units` into whole shares of 1 or more, one for each weight, so that
/// the largest (share + taken) / weight is as small as possible. Empty when
/// there are fewer units than weights.
std::vector<int64_t> share_out(
    int64_t units, const std::vector<double>& weights,
    const std::vector<double>& taken = {});

}  // namespace echelon
