// Whether ranks that should hold the same parameters do. They can drift apart
// without an error: by a fault of a device or its memory, or by a program that
// changes parameters on one rank alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

/// Ranks that should have the same digest, and have not.
struct Divergence {
  std::vector<int> ranks;  // that were compared
  std::vector<int> wrong;  // not as most of them; empty: there is no majority

  bool operator==(const Divergence&) const = default;
};

/// The first ranks, by their lowest number, whose digests differ.
///
///   digests  by rank
///   sets     by rank: ranks of one number should have the same digest
std::optional<Divergence> find_divergence(
    const std::vector<int64_t>& digests, const std::vector<int64_t>& sets);

/// Compares the parameters of all ranks that hold the same ones: data-parallel
/// replicas of them, and tensor-parallel ranks with all of a parameter.
class ReplicaCheck {
 public:
  /// Every rank of the world makes one. Borrows its arguments.
  ReplicaCheck(
      World& world, const MeshGroups& groups, const ParallelModel& model);

  /// False when no two ranks of the world hold the same parameters.
  bool has_replicas() const;

  /// Every rank of the world calls this, between steps. Returns nothing when
  /// replicas are equal to the last bit; else which ranks and which parameters
  /// differ, a sentence that is the same on all ranks.
  std::optional<std::string> compare() const;

 private:
  // By where copies of a parameter are: over dp_replicate alone, over all data-
  // parallel ranks, and over tensor-parallel ranks too. Experts, of which the
  // ranks of ep have different ones, have three kinds of their own.
  static constexpr size_t kOfExperts = 3;  // the first of those
  static constexpr size_t kKinds = 2 * kOfExperts;
  static size_t kind_of(const LocalParameter& part);

  std::string describe(size_t kind, const Divergence& found) const;

  World& world_;
  const ParallelModel& model_;
  std::vector<int64_t> sets_[kKinds];  // find_divergence()'s
  bool has_replicas_[kKinds] = {};     // some set has several ranks
};

/// The error of a job whose replicas differ after `step`.
///
///   difference  what compare() returned
///   equal       the last step after which they were equal; -1: none
///   checkpoint  the newest on disk, which is from before; empty: none
std::string divergence_text(
    int64_t step, const std::string& difference, int64_t equal,
    const std::string& checkpoint);

namespace detail {

/// Sums modulo 2^64 of the bits of each 1024 elements, and of the rest: int64
/// on the tensor's device. A change of one element changes a sum.
std::vector<torch::Tensor> sums_of_rows(const torch::Tensor& tensor);

}  // namespace detail
}  // namespace echelon
