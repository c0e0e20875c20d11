// The router of a mixture of experts: which experts compute a token, with which
// weights, and the losses that keep their load even.
//
//   const RoutingOptions options{.experts = 8, .per_token = 2};
//   const auto routing = route(router(x), options, batch, is_training());
//   const Assignment sorted(routing.experts, options.experts);
//   auto rows = sorted.spread(x);  // one for each choice, by expert
//   … each expert computes its rows …
//   y = sorted.collect(rows, routing.weights);
//
// Without a capacity no token is dropped, however many choose one expert.
//
// Sources: Shazeer et al., 2017, arXiv:1701.06538; Jiang et al., "Mixtral of
// Experts", 2024, arXiv:2401.04088. The balance loss of a sequence:
// DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1.3; z-loss:
// Zoph et al., "ST-MoE", 2022, arXiv:2202.08906. Sigmoids, groups and the bias
// of the choice: DeepSeek-AI, "DeepSeek-V3", 2024, arXiv:2412.19437, section
// 2.1.2; Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024,
// arXiv:2408.15664. Capacities: Lepikhin et al., "GShard", 2020,
// arXiv:2006.16668, section 2.2.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "echelon/comm/group.h"
#include "echelon/layout/shard.h"
#include "echelon/parallel/expert/row_counts.h"

namespace echelon {

struct RoutingOptions {
  int64_t experts = 1;
  int64_t per_token = 1;  // k, at most `experts`
  bool normalize = true;  // the weights of a token sum to 1
  bool sigmoid = false;   // of each score by itself, not a softmax over all
  /// Equally many experts each, two or more where there are several groups. A
  /// token's experts are in the `groups_per_token` groups whose two highest
  /// experts have the highest sum.
  int64_t groups = 1;
  int64_t groups_per_token = 1;
  double scale = 1;     // multiplies the weights
  double aux_loss = 0;  // coefficients; 0: the loss is not computed
  double z_loss = 0;
  double capacity_factor = 0;  // of capacity_tokens(); 0: nothing is dropped

  bool has_losses() const { return aux_loss > 0 || z_loss > 0; }
};

/// Samples of which the ranks of a group have parts (parallel/context/). By
/// default this rank has whole samples.
struct SampleParts {
  Group group = Group::alone("cp");
  /// For each rank, the positions of its tokens in a sample, in the order in
  /// which it has them. All ranks have as many ranges, some of which may be
  /// empty.
  std::vector<std::vector<IndexRange>> pieces;

  bool is_used() const { return group.size() > 1; }
  /// The tokens of a whole sample, of which `here` are on this rank.
  int64_t length(int64_t here) const;
  /// The ranges of this rank. With whole samples there is one, and `pieces` is
  /// empty.
  const std::vector<IndexRange>& here() const {
    return pieces[static_cast<size_t>(group.rank())];
  }
  int64_t num_pieces() const { return is_used() ? std::ssize(here()) : 1; }
};

struct Routing {
  /// int64 [tokens, k]: the experts with the highest probabilities, the highest
  /// first; of equal ones the lower number comes first.
  torch::Tensor experts;
  /// [tokens, k]: their probabilities (or sigmoids) among all experts, or
  /// divided by the sum of the k, times the scale.
  torch::Tensor weights;
  /// [samples], the losses of each sample, of which this is the part of the
  /// tokens here: the ranks' parts add up. Undefined: none.
  torch::Tensor losses;
  /// int64 [samples, pieces, experts]: how many tokens of a sample, before each
  /// of its pieces here, chose each expert. Undefined with whole samples, and
  /// without a capacity.
  torch::Tensor earlier;
};

/// Routes tokens by their `scores` [tokens, experts]. float16 and bfloat16 are
/// computed in float32. Differentiable, but for the choice.
///
///   samples   the tokens are those of so many samples of equal length, one
///             after the other
///   training  whether losses and capacities count
///   bias      [experts], added to probabilities for the choice alone;
///             undefined: none
///   parts     of the samples; every rank of its group calls this. In training,
///             with aux_loss or a capacity, they tell each other their loads
///             by one all-gather of whole numbers, "<label> loads"
///
/// The losses of a sample with T tokens, which depend on no other sample, and
/// so on no layout and no number of microbatches:
///
///   aux_loss * sum over experts e of f_e P_e
///              f_e = (tokens that chose e) * experts / (k T)
///              P_e = mean probability of e; sigmoids are divided by their
///              sum over all experts
///   z_loss   * mean over tokens of log(sum over experts of exp(score))^2
///
/// The first is 1 * aux_loss when all experts have the same load.
Routing route(
    const torch::Tensor& scores, const RoutingOptions& options, int64_t samples,
    bool training, const torch::Tensor& bias = {},
    const SampleParts& parts = {}, const std::string& label = {});

/// How many choices each expert has: int64 [num_experts] on the device of
/// `experts`, which nothing waits for.
torch::Tensor loads_of(const torch::Tensor& experts, int64_t num_experts);

/// How many tokens of a sample an expert takes: the first of those that chose
/// it. The other choices are dropped. A token is dropped or not whatever the
/// other samples and the later tokens are, so no layout and no number of
/// microbatches changes what is dropped; over the tokens of a rank, each would.
struct Capacity {
  int64_t samples = 1;  // as of route()
  int64_t tokens = 0;   // of one sample
  SampleParts parts;
  torch::Tensor earlier;  // Routing::earlier
};

/// capacity_factor * tokens * k / experts, rounded up: so many times the mean
/// load of a sample of `tokens`.
int64_t capacity_tokens(int64_t tokens, const RoutingOptions& options);

/// The choices of all tokens, sorted by expert; those of one expert are in the
/// order of the tokens.
class Assignment {
 public:
  /// `experts` int64 [tokens, k]. With a capacity the host reads the counts, to
  /// know how many rows there are. On the meta device, which has no values, the
  /// load of all experts is even.
  Assignment(
      const torch::Tensor& experts, int64_t num_experts,
      const std::optional<Capacity>& capacity = std::nullopt);

  /// Rows of each expert. Their sum is tokens * k, less the dropped choices.
  const RowCounts& counts() const { return counts_; }
  /// How many choices each expert got, and how many of these were dropped
  /// (undefined without a capacity). int64 [num_experts] on the device.
  const torch::Tensor& loads() const { return loads_; }
  const torch::Tensor& dropped() const { return dropped_; }

  /// x [tokens, width] -> [sum of counts, width], the rows of expert 0 first.
  torch::Tensor spread(const torch::Tensor& x) const;
  /// Rows in the order of spread(), times the weights [tokens, k] of the
  /// choices, summed for each token -> [tokens, width]. A dropped choice adds
  /// nothing.
  torch::Tensor
  collect(const torch::Tensor& rows, const torch::Tensor& weights) const;

 private:
  torch::Tensor order_;    // [sum of counts]: the choice of each row
  torch::Tensor inverse_;  // [tokens * k]: the row of each choice; undefined:
                           // there may be choices without a row
  torch::Tensor loads_, dropped_;
  int64_t per_token_;
  RowCounts counts_;
};

/// rows.index_select(0, order) for a permutation, whose backward is one too.
torch::Tensor permuted(
    const torch::Tensor& rows, const torch::Tensor& order,
    const torch::Tensor& inverse);

}  // namespace echelon
