// Gradient norms layer by layer: where gradients vanish, or explode first.
#pragma once

#include <string>
#include <vector>

#include "echelon/train/strategies/parallel_model.h"

namespace echelon {

/// The 2-norm of the gradients of each of `layers`, the names of the whole
/// model's list, as they are now; 0 for a layer without parameters. A parameter
/// that is tied counts where its first name is; NaN or infinite where a
/// gradient is.
///
/// Every rank calls, and gets the same: each element of the model counts once,
/// however it is cut. One small sum over the ranks; waits for the device.
std::vector<double>
layer_norms(const ParallelModel& model, const std::vector<std::string>& layers);

}  // namespace echelon
