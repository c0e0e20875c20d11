// Forward once more in backward, in place of keeping what it saved.
// Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016,
// arXiv:1604.06174; Korthikanti et al., 2022, arXiv:2205.05198 (selective).
//
//   layer.forward = recomputed(layer.forward, {.name = layer.name});
//   layer.forward = recomputed(layer.forward, {.keep = matrix_products()});
#pragma once

#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

namespace echelon {

/// A layer's forward: what models/layer_list.h calls so.
using LayerForward = std::function<std::vector<torch::Tensor>(
    const std::vector<torch::Tensor>&)>;

struct RecomputeOptions {
  /// Operators whose results are kept and not computed again, as "aten::mm", or
  /// what as_one_operator (operators/operator_scope.h) was told; empty: none. A
  /// result that forward changes in place later is computed again all the same,
  /// as are views and operators that write into an argument.
  std::vector<std::string> keep;
  /// Buffers that forward updates, running statistics and counts: what it
  /// writes to them the second time is lost. Those of batch normalisation need
  /// not be named, but for the count of batches.
  std::vector<torch::Tensor> buffers;
  /// Random generators of forward's own, beside torch's.
  std::vector<at::Generator> generators;
  std::string name;  // of the layer, for errors
};

/// Matrix products, convolutions and attention, by their operators' names, and
/// the products and sums of tensor parallelism, so that nothing is communicated
/// again. Not among them are products of batches (bmm): attention that is
/// written out makes its scores with them, which are large and quick to
/// compute.
const std::vector<std::string>& matrix_products();

/// `forward`, of which its inputs alone are kept (and results of options.keep).
/// Results and gradients are to the bit those of `forward`, which may
/// communicate: it then runs on all ranks of the group, in backward too, up to
/// the last operator that saved something. Random numbers from torch's
/// generators are those of the first time (other threads of the process must
/// not draw from the same generator); autocast is as it was. The first use in
/// backward computes everything; what a retained graph keeps from then on is as
/// without recompute.
///
/// Inner recomputed forwards keep nothing but what the outer one computes
/// again. Hooks outside get the inputs; hooks inside are asked first, both
/// times.
///
/// forward must save the same tensors the second time, and must be free of side
/// effects that count, unless it asks recomputing(). It may end early, by an
/// exception that is not a std::exception. Where it changes its inputs in
/// place, copies of them are kept; its very first run makes copies in order to
/// know that. Backward throws Error, with options.name, when the second run
/// saves others, and when a tensor that it needs was changed in place.
LayerForward recomputed(LayerForward forward, RecomputeOptions options = {});

/// True inside a forward that runs again: counts and statistics stay.
bool recomputing();

}  // namespace echelon
