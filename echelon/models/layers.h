// What several of our models have in common.
#pragma once

#include <cstdint>
#include <memory>

#include "echelon/parallel/tensor/linear.h"

namespace echelon::models {

/// `parallel` for layers whose activations are not cut by tokens.
TensorParallel without_cut_tokens(TensorParallel parallel);

/// The last layer of an image network: from images of this rank's channels,
/// flat [batch, channels_r * pixels], to scores [batch, classes] on every rank.
///
/// weight [classes, channels_r * pixels], bias [classes], not initialised.
std::shared_ptr<RowParallelLinear> scores_of_channels(
    int64_t channels, int64_t pixels, int64_t classes,
    const TensorParallel& parallel);

}  // namespace echelon::models
