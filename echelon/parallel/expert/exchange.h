// Expert parallelism: the experts of a mixture are spread over the ranks of a
// group, each of which has samples of its own. A token's rows go to the ranks
// that have its experts, and come back.
//
//   Exchange exchange(assignment.counts(), group, x, "layer.mlp");
//   … what needs no rows of others …
//   exchange.settle();
//   auto rows = exchange.send(assignment.spread(x));
//   … this rank's experts compute exchange.counts() rows each …
//   rows = exchange.give_back(rows);
//
// Collectives: "<label> counts", "<label> dispatch", "<label> return". The
// ranks' losses add up: the gradient of an expert's weights has the terms of
// all of the group's tokens.
//
// Sources: Lepikhin et al., "GShard", 2020, arXiv:2006.16668; Liu et al., "MoE
// Parallel Folding", 2025, arXiv:2504.14960.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layers/host_copy.h"
#include "echelon/layout/shard.h"
#include "echelon/parallel/expert/row_counts.h"

namespace echelon {

/// The experts that a rank of `group` has: an even share.
IndexRange experts_of(int64_t experts, const Group& group);

/// Sends one layer's rows to their experts, and back, in one pass. In a group
/// of one rank it returns rows as they are.
class Exchange {
 public:
  /// Every rank of the group makes one. Tells the others how many rows they
  /// will get, without a wait for the device. Before anything else is called,
  /// settle() waits for how many go and come, and for nothing that was queued
  /// since.
  ///
  ///   counts  rows of each expert on this rank
  ///   like    a tensor of the device; on the meta device every rank sends
  ///           what this one does, and nothing is sent
  Exchange(
      const RowCounts& counts, const Group& group, const torch::Tensor& like,
      std::string label);
  void settle();

  /// Rows of each of this rank's experts, from all ranks.
  const RowCounts& counts() const { return counts_; }

  /// rows [sum of this rank's counts, width], sorted by expert -> the rows of
  /// this rank's experts, sorted by expert and then by rank. Differentiable:
  /// gradients go the other way.
  torch::Tensor send(const torch::Tensor& rows) const;
  /// The reverse of send().
  torch::Tensor give_back(const torch::Tensor& rows) const;

 private:
  Group group_;
  std::string label_;
  RowCounts counts_;
  torch::Device device_;
  std::optional<HostCopy> numbers_;  // rows of each expert here, and
                                     // [rank * own experts + expert] that come
  std::vector<int64_t> sent_, received_;  // rows, by rank
  torch::Tensor order_, inverse_;  // of received rows: by rank -> by expert
};

/// `tensor`, whose gradient is multiplied by `factor`.
torch::Tensor with_scaled_gradient(const torch::Tensor& tensor, double factor);

}  // namespace echelon
