// Verifies, tensor by tensor, that a layout computes what one device computes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/layers/layer_list.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

struct VerifyOptions {
  int64_t steps = 3;
  double tolerance = 1e-10;  // largest relative difference, in float64
  /// For tests of verify() itself: the layout doubles the gradient of this
  /// parameter on every rank. "first" names the model's first one.
  std::string plant_error;
  /// A run's folder or a checkpoint, where the layout starts; the single rank
  /// starts at step 0. The `steps` steps after the checkpoint are compared.
  std::string resume;
};

/// One comparison: the largest difference over ranks.
struct Difference {
  int64_t step = 0;
  std::string what;     // "loss", "gradient conv1.weight", …
  int rank = 0;         // where it is largest
  double relative = 0;  // largest |a - b| over the largest |b| of the tensor
};

struct VerifyResult {
  bool passed = false;
  std::string layout;  // "dp=2,tp=2"
  int64_t steps = 0;
  int64_t num_compared = 0;       // comparisons, each on every rank
  std::vector<Difference> worst;  // largest first, at most ten
  std::string hint;               // a possible reason, when one is known
  /// What resume could not restore as it was saved, a line each.
  std::vector<std::string> loaded;
};

/// Runs the job's first steps in float64 on one rank (rank 0, without
/// communication) and on the layout, and compares losses, gradients before the
/// update and parameters after it, by name, on every rank. Every rank of the
/// world calls this and gets the same result. Random augmentations depend on
/// the sample alone, so they agree. A shard is compared with the same elements
/// of the full tensor.
///
/// `own` replaces what the job names, as in trainer.h; metrics and on_step are
/// not called.
VerifyResult verify(
    const Job& job, World& world, const VerifyOptions& options,
    const OwnParts& own);
VerifyResult verify(
    const Job& job, World& world, const VerifyOptions& options,
    const LayerList* layers = nullptr);
VerifyResult verify(
    const Job& job, World& world, const VerifyOptions& options,
    const LayerFactory& layers);

/// The first half of a proof that checkpoints are complete: runs the job's
/// first steps in float64 on the layout and saves them into folder/checkpoints.
/// Every rank of the world calls this. The second half is verify() with
/// options.resume = folder, of any layout.
void save_steps(
    const Job& job, World& world, int64_t steps,
    const std::filesystem::path& folder, const OwnParts& own = {});

/// The result as a table whose last line is the verdict, or as a JSON object.
std::string to_text(const VerifyResult& result, const VerifyOptions& options);
std::string to_json(const VerifyResult& result, const VerifyOptions& options);

}  // namespace echelon
