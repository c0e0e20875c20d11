// Activation checkpointing: backward runs forward a second time instead of
// keeping what it saved.
// Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016,
// arXiv:1604.06174; Korthikanti et al., 2022, arXiv:2205.05198 (selective).
//
//   layer.forward = recomputed(layer.forward, {.name = layer.name});
//   layer.forward = recomputed(layer.forward, {.keep = matmul_operators()});
#pragma once

#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

namespace echelon {

/// A layer's forward, as in layers/layer_list.h.
using LayerForward = std::function<std::vector<torch::Tensor>(
    const std::vector<torch::Tensor>&)>;

struct RecomputeOptions {
  /// Operators whose results are kept and not recomputed, as "aten::mm" or
  /// under the name given to as_one_operator (profiling/operator_scope.h);
  /// empty: none. Results that forward later changes in place are recomputed
  /// all the same, as are views and operators that write into an argument.
  std::vector<std::string> keep;
  /// Buffers that forward updates, such as running statistics and counters: the
  /// updates of the second run are lost. Running statistics of batch
  /// normalisation need not be named, but its batch counter must be.
  std::vector<torch::Tensor> buffers;
  /// Random generators that forward uses in addition to torch's.
  std::vector<at::Generator> generators;
  std::string name;  // of the layer, for errors
};

/// The names of the operators of matmuls, convolutions and attention, and of
/// the products and collectives of tensor parallelism, so that nothing is
/// communicated again. Batched matmuls (bmm) are not among them: attention that
/// is written out computes its scores with them, which are large and cheap to
/// recompute.
const std::vector<std::string>& matmul_operators();

/// `forward`, of which only the inputs are kept (and results of options.keep).
/// Results and gradients equal those of `forward` bit for bit. `forward` may
/// communicate: then it runs on all ranks of the group in backward too, up to
/// the last operator that saved a tensor. The second run draws the same random
/// numbers from torch's generators (other threads of the process must not draw
/// from the same generator) and has the same autocast state. The first use in
/// backward recomputes everything; from then on a retained graph keeps what it
/// would keep without recompute.
///
/// When recomputed forwards nest, an inner one keeps only what the outer one
/// recomputes. Hooks outside get the inputs; hooks inside are asked first, in
/// both runs.
///
/// forward must save the same tensors in the second run, and must not have
/// other side effects unless it asks recomputing(). It may end early, by an
/// exception that is not a std::exception. If it changes its inputs in place,
/// copies of them are kept; the very first run makes copies to find that out.
/// Backward throws Error, with options.name, when the second run saves other
/// tensors, and when a tensor that it needs was changed in place.
LayerForward recomputed(LayerForward forward, RecomputeOptions options = {});

/// True while a forward runs a second time: counters and statistics must not
/// change.
bool recomputing();

}  // namespace echelon
