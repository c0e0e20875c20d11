// Linear layers whose matrix is sharded over a tensor-parallel group.
//
//   Y = X A, A = [A_1 A_2]        column parallel: each rank has some outputs
//   Y = X_1 A_1 + X_2 A_2         row parallel: each rank has some inputs
//
//   ColumnParallelLinear up({.in = 512, .out = 2048}, parallel, "up");
//   RowParallelLinear down({.in = 2048, .out = 512}, parallel, "down");
//   y = down.forward(torch::gelu(up.forward(x)));    // one all-reduce
//
// Weights are [out, in], as in torch::nn::Linear, or [in, out], as in GPT-2's
// Conv1D of Hugging Face.
//
// Sources: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3;
// Korthikanti et al., 2022, arXiv:2205.05198, section 4.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

enum class WeightLayout { out_in, in_out };

/// A weight and its bias, which may be undefined.
struct LinearWeights {
  torch::Tensor weight;
  torch::Tensor bias;
};

/// Multiplies x by each of the local weights: the begin of a tensor-parallel
/// region.
///
///   x        [..., in], replicated; with sharded tokens [tokens_r, in]
///   tokens   number of tokens on all ranks; read when they are sharded
///   returns  per weight [..., out_r] of all tokens; with sharded tokens
///            [tokens, out_r]
///
/// Forward communicates nothing; with sharded tokens it all-gathers them in
/// options.overlap_chunks chunks, each multiplied while the next arrives.
/// Backward all-reduces the input's gradient, once for all weights (with
/// sharded tokens it reduce-scatters it), while it computes the weights'
/// gradients; where no weight needs one, in chunks. Gathered tokens are not
/// stored for backward: they are all-gathered again while the input's gradient
/// is computed. In a backward of two halves (zero bubble), the first half sums
/// and the second one gathers. Collectives:
/// "<label> gather", "<label> input gradient".
///
/// All ranks of the group call this, and agree on which tensors require
/// gradients: a single rank that skips a collective hangs the others. Throws
/// ConfigError for an input that does not have this rank's rows. Backward
/// cannot be differentiated again (Error), unless the group has one rank. Other
/// layers may use the same weight.
std::vector<torch::Tensor> column_linear(
    const torch::Tensor& x, const std::vector<LinearWeights>& weights,
    WeightLayout layout, const TensorParallel& parallel, int64_t tokens,
    const std::string& label);

/// The sum over the ranks of x_r times the local weight, plus the bias once:
/// the end of a tensor-parallel region.
///
///   x        [..., in_r]; with sharded tokens [tokens, in_r] of all tokens
///   bias     [out] or undefined; with sharded tokens its gradient is this
///            rank's term of a sum
///   returns  [..., out]; with sharded tokens this rank's [tokens_r, out]
///
/// Forward all-reduces, or with sharded tokens reduce-scatters, in
/// options.overlap_chunks chunks, each communicated while the next is computed.
/// Backward communicates nothing, or all-gathers in such chunks. Collectives:
/// "<label> sum", or "<label> scatter" and "<label> gather". Otherwise as
/// column_linear.
torch::Tensor row_linear(
    const torch::Tensor& x, const torch::Tensor& weight,
    const torch::Tensor& bias, WeightLayout layout,
    const TensorParallel& parallel, const std::string& label);

/// Weights [out_i, in] as one matrix, and their biases as one vector, where
/// they lie one after the other in memory, as in the flat buffers of
/// parallel/shard; nullopt where they do not, or where only some of them
/// require a gradient. Backward gives each its part of the gradient, a view.
std::optional<LinearWeights> joined(const std::vector<LinearWeights>& weights);

/// x [..., features] as tensors of `sizes` features each, which share its
/// memory. Where their gradients lie side by side too, backward copies nothing.
/// Differentiable any number of times.
std::vector<torch::Tensor>
split_features(const torch::Tensor& x, at::IntArrayRef sizes);

struct LinearShape {
  int64_t in = 1;
  int64_t out = 1;
  bool bias = true;
  WeightLayout layout = WeightLayout::out_in;
};

/// A linear layer that may have an adapter of low rank beside its weight:
///
///   y = x W + bias + scale * (x A) B
///
///   lora_A.weight  [rank, in]: this rank's inputs where the layer is sharded
///   by
///                  its inputs
///   lora_B.weight  [out, rank]: this rank's outputs where it is sharded by its
///                  outputs
///
/// What is not sharded is on every rank. Hu et al., "LoRA", 2021,
/// arXiv:2106.09685; initial values as architecture/trained_parameters.h says.
class AdaptedLinear : public ShardedModule {
 public:
  /// Adds the adapter; call it once, before the first forward.
  virtual void add_adapter(int64_t rank, double scale) = 0;
  bool has_adapter() const { return a_.defined(); }

 protected:
  /// Registers the adapter of a weight [out, in] (or its transpose) that is
  /// sharded by its outputs, as this layer's "weight" is: each rank has A,
  /// whose gradient there is the part of the rank's outputs.
  void adapt_outputs(
      int64_t out, int64_t in, int64_t rank, double scale,
      const TensorParallel& parallel);
  /// The same by its inputs: each rank has B. `sum_gradients`: of B
  /// (ParameterShard).
  void adapt_inputs(
      int64_t out, int64_t in, int64_t rank, double scale,
      const TensorParallel& parallel, bool sum_gradients);
  /// y plus this adapter's part, of `inner` = x A.
  torch::Tensor
  with_adapter(const torch::Tensor& y, const torch::Tensor& inner) const;

  torch::Tensor a_, b_;  // undefined: there is no adapter
  double scale_ = 1;

 private:
  void register_adapter(ParameterShard a, ParameterShard b, double scale);
};

/// Gives these linear layers of a module adapters. `names`: as the module calls
/// them ("self_attn.q_proj"). Throws Error for a name that it does not have.
void add_adapters(
    torch::nn::Module& module, const std::vector<std::string>& names,
    int64_t rank, double scale);

/// A linear layer sharded by its outputs: weight [out_r, in] (or [in, out_r]),
/// bias [out_r].
class ColumnParallelLinear : public AdaptedLinear {
 public:
  /// An even shard of the outputs. With `gather_output`, forward all-gathers
  /// them ("<label> gather").
  ColumnParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      bool gather_output = false);
  /// Any shard: `outputs` tells which outputs are on this rank and owned by it
  /// (Shard::pieces and owned; shape and dim are not read). `shared`, the same
  /// on every rank, tells whether several ranks hold one output, whose gradient
  /// there is a term of the sum that SharedGradients takes.
  ColumnParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      const Shard& outputs, bool shared);

  /// `tokens` on all ranks; needed when they are sharded. Without `for_bias`
  /// the bias is added, but backward does not compute its gradient.
  torch::Tensor
  forward(const torch::Tensor& x, int64_t tokens = 0, bool for_bias = true);
  void add_adapter(int64_t rank, double scale) override;
  LinearWeights weights() const { return {weight, bias}; }

  /// column_linear for layers of one layout that share an input, with their
  /// adapters: it communicates once. Weights that are joined() are multiplied
  /// at once.
  static std::vector<torch::Tensor> forward_all(
      const std::vector<std::shared_ptr<ColumnParallelLinear>>& layers,
      const torch::Tensor& x, int64_t tokens, const std::string& label);
  /// The outputs of all of them side by side, if the weights are joined() and
  /// have no adapters; else undefined.
  static torch::Tensor forward_joined(
      const std::vector<std::shared_ptr<ColumnParallelLinear>>& layers,
      const torch::Tensor& x, int64_t tokens, const std::string& label);

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  void add_weights(std::vector<LinearWeights>& weights) const;

  LinearShape shape_;
  TensorParallel parallel_;
  std::string label_;
  bool gather_output_ = false;
  std::vector<int64_t> output_sizes_;  // by rank, when they are all-gathered
};

/// A linear layer sharded by its inputs: weight [out, in_r] (or [in_r, out]),
/// bias [out] on every rank.
class RowParallelLinear : public AdaptedLinear {
 public:
  /// An even shard of the inputs. With `scatter_input`, forward takes all
  /// inputs and uses this rank's; backward all-gathers their gradient ("<label>
  /// input gradient").
  RowParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      bool scatter_input = false);
  /// Any shard: `inputs` as `outputs` above. Each input is on one rank.
  RowParallelLinear(
      const LinearShape& shape, TensorParallel parallel, std::string label,
      const Shard& inputs);

  /// With an adapter also sums x A ("<label>.lora_A sum", or "… scatter" and
  /// "… gather").
  torch::Tensor forward(const torch::Tensor& x);
  void add_adapter(int64_t rank, double scale) override;

  torch::Tensor weight;
  torch::Tensor bias;

 private:
  LinearShape shape_;
  TensorParallel parallel_;
  std::string label_;
  bool scatter_input_ = false;
};

}  // namespace echelon
