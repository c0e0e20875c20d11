// Parameters of different stages that are one: found on whichever ranks own
// them, compared at the start, and their gradients summed after each step.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/parallel/pipeline/pipeline_stage.h"

namespace echelon {

/// A parameter of a stage, or the range of its elements that is here, which is
/// the same one of all that it is tied to.
struct StageParameter {
  std::string name;
  int32_t stage = 0;
  torch::Tensor tensor;  // a leaf, with the gradient in its .grad
};

/// Every rank of the pipeline's group constructs one and makes the same calls.
/// Ties are the same list on every rank; ties of ties are one parameter.
class TiedParameters {
 public:
  /// Throws ConfigError, by name, when no rank has one of a tie, or when dtypes
  /// or shapes differ.
  TiedParameters(
      const Group& group, const std::vector<Tie>& ties,
      const std::vector<PipelineStage>& stages);
  /// `parameters`: of this rank's stages. They may lie elsewhere than on
  /// `device`, on which ranks communicate.
  TiedParameters(
      const Group& group, const std::vector<Tie>& ties,
      const std::vector<StageParameter>& parameters, torch::Device device);

  /// Gives all of them the first one's values.
  void copy_first();
  /// Throws ConfigError for values that differ.
  void check_equal() const;
  /// Each .grad <- the sum over all that are tied, in one order on every rank,
  /// so that they stay equal. No gradient counts as zero.
  void sum_gradients() const;

  /// Parameters of this rank that an earlier stage owns: to be left out of a
  /// gradient norm and of checkpoints.
  const std::set<std::string>& duplicates() const { return duplicates_; }

 private:
  struct Member {
    std::string name;
    int rank = 0;
    torch::Tensor tensor;  // defined on its rank
  };
  using Set = std::vector<Member>;  // by stage

  std::vector<torch::Tensor>
  gather(const Set& set, size_t index, bool gradients) const;

  Group group_;
  torch::Device device_;
  std::vector<Set> sets_;
  std::set<std::string> duplicates_;
};

}  // namespace echelon
