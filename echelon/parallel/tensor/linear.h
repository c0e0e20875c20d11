// Matrix products whose matrix is cut over a tensor-parallel group.
//
//   Y = X A, A = [A_1 A_2]        column parallel: each rank has some outputs
//   Y = X_1 A_1 + X_2 A_2         row parallel: each rank has some inputs
//
// Weights are as torch::nn::Linear has them, [out, in], or as Hugging Face's
// Conv1D of GPT-2 has them, [in, out].
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

enum class WeightLayout { out_in, in_out };

/// One of the products that share an input; `bias` may be undefined.
struct LinearWeights {
  torch::Tensor weight;
  torch::Tensor bias;
};

/// x times each of the local weights: the beginning of a tensor-parallel
/// region.
///
///   x        replicated: [..., in]; with cut tokens: this rank's [tokens_r,
///   in] tokens   how many there are on all ranks; read when they are cut
///   returns  per weight [..., out_r], of all tokens ([tokens, out_r] when they
///            were cut)
///
/// Forward: nothing is sent, or tokens are gathered (in options.overlap_chunks
/// pieces, each multiplied while the next arrives). Backward: the input's
/// gradient is summed over the ranks (reduce-scattered when tokens are cut)
/// while the weights' gradients are computed; one sum for all of the weights.
/// Gathered tokens are not kept for backward, but gathered again while the
/// input's gradient is computed. In a backward of two halves (zero bubble) the
/// first sums, the second gathers. Collectives: "<label> gather",
/// "<label> input gradient".
///
/// All ranks of the group call, and agree on what requires gradients: a rank
/// alone that skips a collective hangs the others. ConfigError for an input
/// whose rows are not this rank's. Backward cannot be differentiated again
/// (Error), unless the group has one rank. A weight may be used again
/// elsewhere. Source: Shoeybi et al., 2019, section 3; Korthikanti et al.,
/// 2022, section 4.
std::vector<torch::Tensor> column_linear(
    const torch::Tensor& x, const std::vector<LinearWeights>& weights,
    WeightLayout layout, const TensorParallel& parallel, int64_t tokens,
    const std::string& label);

/// The end of a region: the sum over the ranks of x_r times the local weight,
/// plus the bias, once.
///
///   x        [..., in_r] (with cut tokens [tokens, in_r]: all of them)
///   bias     whole, or undefined; with cut tokens its gradient is this rank's
///            part of a sum
///   returns  [..., out]; with cut tokens this rank's [tokens_r, out]
///
/// Forward: all-reduce, or reduce-scatter, in options.overlap_chunks pieces,
/// each on its way while the next is multiplied. Backward: nothing, or
/// all-gather. Collectives: "<label> sum"; "<label> scatter", "<label> gather".
/// Otherwise as column_linear.
torch::Tensor row_linear(
    const torch::Tensor& x, const torch::Tensor& weight,
    const torch::Tensor& bias, WeightLayout layout,
    const TensorParallel& parallel, const std::string& label);

struct LinearShape {
  int64_t in = 1;
  int64_t out = 1;
  bool bias = true;
  WeightLayout layout = WeightLayout::out_in;
};

/// A linear layer cut by its outputs. weight [out_r, in] (or [in, out_r]), bias
/// [out_r].
class ColumnParallelLinear : public ShardedModule {
 public:
  /// An even part of the outputs. `gather_output`: forward returns all of them,
  /// on every rank ("<label> gather").
  ColumnParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      bool gather_output = false);
  /// Other parts: `outputs` says which are here and owned (Shard::pieces and
  /// owned; shape and dim are not read). `shared`, the same on every rank:
  /// whether any output lies on several ranks. Its gradient there is a part of
  /// a sum, which SharedGradients takes.
  ColumnParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      const Shard& outputs, bool shared);

  /// `tokens`: on all ranks; needed when they are cut.
  torch::Tensor forward(const torch::Tensor& x, int64_t tokens = 0);
  LinearWeights weights() const { return {weight, bias}; }

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  LinearShape shape_;
  TensorParallel parallel_;
  std::string label_;
  bool gather_output_ = false;
  std::vector<int64_t> output_sizes_;  // by rank, when they are gathered
};

/// A linear layer cut by its inputs. weight [out, in_r] (or [in_r, out]), bias
/// [out], whole.
class RowParallelLinear : public ShardedModule {
 public:
  /// An even part of the inputs. `scatter_input`: forward takes all inputs and
  /// uses this rank's part; backward gathers their gradient ("<label> input
  /// gradient").
  RowParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      bool scatter_input = false);
  /// Other parts: `inputs` as `outputs` above. Each input lies on one rank.
  RowParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      const Shard& inputs);

  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  LinearShape shape_;
  TensorParallel parallel_;
  std::string label_;
  bool scatter_input_ = false;
};

}  // namespace echelon
