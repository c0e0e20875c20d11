// Forward once more in backward, in place of keeping what it saved.
// Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016,
// arXiv:1604.06174; Korthikanti et al., 2022, arXiv:2205.05198 (selective).
#pragma once

#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

namespace echelon {

/// A layer's forward: what models/layer_list.h calls so.
using LayerForward =
    std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>&)>;

struct RecomputeOptions {
  /// Operators whose results are kept and not computed again; empty: none.
  std::vector<std::string> keep;
};

/// Matrix products, convolutions and attention, by their operators' names.
const std::vector<std::string>& matrix_products();

/// `forward`, of which its inputs alone are kept (and results of options.keep).
/// Results and gradients are to the bit those of `forward`, which may communicate:
/// it then runs on all ranks of the group, in backward too. Random numbers from
/// torch's generators are those of the first time (other threads of the process
/// must not draw from the same generator); autocast is as it was.
///
/// forward must be free of side effects that count: buffers that it updates are
/// updated twice, unless it asks recomputing().
LayerForward recomputed(LayerForward forward, RecomputeOptions options = {});

/// True inside a forward that runs again: running statistics stay.
bool recomputing();

}  // namespace echelon
