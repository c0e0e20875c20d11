// The MLP of a transformer block, whose inner features are sharded over a
// tensor-parallel group: it communicates once at its begin and once at its end.
//
//   GatedMlp mlp({.hidden = 4096, .intermediate = 11008}, parallel, "mlp");
//   y = mlp.forward(x, batch * sequence);
//
// Sources: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3;
// SwiGLU: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

struct MlpShape {
  int64_t hidden = 1;
  /// Inner features, sharded evenly (shares differ by one at most). With fewer
  /// features than ranks, some ranks have none.
  int64_t intermediate = 1;
  bool bias = true;
  bool gelu = false;  // GatedMlp: in place of silu
};

/// silu(gate) * up, for equal shapes. Stores only these two for backward. On a
/// CPU each element passes through memory once in forward and once in backward.
torch::Tensor silu_times(const torch::Tensor& gate, const torch::Tensor& up);

/// The tanh form of GELU of a product x [..., features] that has the bias
/// [features] already, but whose own backward gives the bias no gradient
/// (ColumnParallelLinear::forward): that is the sum of x's gradient, which a
/// GPU takes while it computes x's.
torch::Tensor gelu_with_bias(const torch::Tensor& x, const torch::Tensor& bias);

/// GPT-2's: c_proj(gelu(c_fc(x))), with the tanh form of GELU ("gelu_new").
///
///   c_fc.weight [hidden, intermediate_r], c_fc.bias [intermediate_r],
///   c_proj.weight [intermediate_r, hidden], c_proj.bias [hidden]
///
/// `label`: "transformer.h.0.mlp", for collectives.
class GeluMlp : public torch::nn::Module {
 public:
  GeluMlp(const MlpShape& shape, TensorParallel parallel, std::string label);

  /// x [batch, sequence, hidden], or with sharded tokens [tokens_r, hidden] ->
  /// the same shape. `tokens` on all ranks; read when they are sharded. Every
  /// rank of the group calls this.
  torch::Tensor forward(const torch::Tensor& x, int64_t tokens);

 private:
  std::shared_ptr<ColumnParallelLinear> in_;
  std::shared_ptr<RowParallelLinear> out_;
};

/// llama's: down_proj(silu(gate_proj(x)) * up_proj(x)); gemma's has the tanh
/// form of GELU in place of silu.
///
///   gate_proj.weight and up_proj.weight [intermediate_r, hidden],
///   down_proj.weight [hidden, intermediate_r]; biases if MlpShape::bias
class GatedMlp : public torch::nn::Module {
 public:
  GatedMlp(const MlpShape& shape, TensorParallel parallel, std::string label);

  /// The arguments are those of GeluMlp::forward.
  torch::Tensor forward(const torch::Tensor& x, int64_t tokens);

 private:
  TensorParallel parallel_;
  std::string label_;
  bool gelu_;
  std::shared_ptr<ColumnParallelLinear> gate_;
  std::shared_ptr<ColumnParallelLinear> up_;
  std::shared_ptr<RowParallelLinear> down_;
};

}  // namespace echelon
