#include "echelon/models/layers.h"

#include <utility>

namespace echelon::models {

TensorParallel without_cut_tokens(TensorParallel parallel) {
  parallel.options.sequence_parallel = false;
  return parallel;
}

std::shared_ptr<RowParallelLinear> scores_of_channels(
    int64_t channels, int64_t pixels, int64_t classes,
    const TensorParallel& parallel) {
  const auto mine = parallel.part_of(channels);
  const IndexRange features{mine.begin * pixels, mine.end * pixels};
  return std::make_shared<RowParallelLinear>(
      LinearShape{.in = channels * pixels, .out = classes},
      without_cut_tokens(parallel), "fc",
      Shard{.pieces = {features}, .owned = {features}});
}

}  // namespace echelon::models
