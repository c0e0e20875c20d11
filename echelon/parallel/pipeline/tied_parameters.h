// Tied parameters of different pipeline stages: finds the ranks that hold them,
// compares their values at the start, and sums their gradients after each step.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layers/layer_list.h"

namespace echelon {

/// A parameter of a stage, or a shard of it. Tied parameters are sharded
/// equally.
struct StageParameter {
  std::string name;
  int32_t stage = 0;
  torch::Tensor tensor;  // a leaf, with the gradient in its .grad
};

/// Every rank of the pipeline's group constructs one, with the same list of
/// ties, and makes the same calls. A tie with a tied parameter extends its set.
class TiedParameters {
 public:
  /// `parameters` of this rank's stages may be on another device than `device`,
  /// on which the ranks communicate. Throws ConfigError, with the names, when
  /// no rank has a tied parameter, or when dtypes or shapes differ.
  TiedParameters(
      const Group& group, const std::vector<Tie>& ties,
      const std::vector<StageParameter>& parameters, torch::Device device);

  /// Copies the values of the first parameter of each set to the others.
  void copy_first();
  /// Throws ConfigError if the values of a set differ.
  void check_equal() const;
  /// Sets each .grad to the sum over its set, in one order on every rank, so
  /// that values stay equal. A missing gradient counts as zero.
  void sum_gradients() const;

  /// Parameters of this rank that an earlier stage owns: leave them out of
  /// gradient norms and checkpoints.
  const std::set<std::string>& duplicates() const { return duplicates_; }

 private:
  struct Member {
    std::string name;
    int rank = 0;
    torch::Tensor tensor;  // defined on its rank
  };
  using Set = std::vector<Member>;  // tied parameters, by stage

  std::vector<torch::Tensor>
  gather(const Set& set, size_t index, bool gradients) const;

  Group group_;
  torch::Device device_;
  std::vector<Set> sets_;
  std::set<std::string> duplicates_;
};

}  // namespace echelon
