// A data set: samples by index, ready for the model.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "echelon/options/data.h"

namespace echelon {

/// What one rank gets of one global batch.
struct Batch {
  torch::Tensor inputs;   // [n, input_shape...]
  torch::Tensor targets;  // [n, target_shape...]
  /// What the model's first layer takes after the inputs, each [n, ...]:
  ///   documents  int64 [n, sequence], where text is packed and its borders are
  ///              respected: tokens attend within their document alone
  ///   keys       int64 [n], where the model has dropout: a number that depends
  ///              on the seed, the epoch and the sample alone, which random
  ///              masks are made from. Always the last.
  std::vector<torch::Tensor> more;
  std::vector<int64_t> indices;  // n dataset indices; n may be 0
  /// Samples of the global batch, over all ranks, as planned. Where samples can
  /// be skipped (Dataset::may_skip), what arrived is the sum of inputs.size(0)
  /// over the ranks: only they can count it.
  int64_t global_count = 0;
  int64_t skipped = 0;  // broken samples that this rank left out
  std::vector<std::string> skip_reasons;  // one each
};

/// What a random augmentation depends on beside the sample's index; nothing
/// else (rank, thread, batch) matters.
struct SampleContext {
  uint64_t seed = 0;
  int64_t epoch = 0;
  bool training = true;  // false: no random crop or flip
};

/// A tensor of Batch::more that the data set fills, for one sample.
struct MoreSpec {
  std::vector<int64_t> shape;
  torch::Dtype dtype = torch::kInt64;
};

/// One sample's tensors.
struct SampleSpec {
  std::vector<int64_t> input_shape;
  torch::Dtype input_dtype = torch::kFloat32;
  std::vector<int64_t> target_shape;  // [] for a class number
  torch::Dtype target_dtype = torch::kInt64;
  int64_t classes = 0;  // 0: targets are no class numbers
  std::vector<MoreSpec> more;
  /// No target is ever negative, so that no token of a text is left out of the
  /// loss, and samples of one shape weigh the same. False: the targets of each
  /// batch are counted.
  bool every_target_counts = false;
};

/// Where a sample is written: contiguous memory of spec()'s shapes and dtypes.
struct SampleMemory {
  std::byte* input = nullptr;
  std::byte* target = nullptr;
  std::vector<std::byte*> more;  // one for each of SampleSpec::more
};

/// Implementations are safe to use from many threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;

  virtual int64_t size() const = 0;
  virtual SampleSpec spec() const = 0;

  /// Writes all of sample `index` (in [0, size)). Throws DataError that names
  /// the file when it is broken.
  virtual void load(
      int64_t index, const SampleContext& context,
      const SampleMemory& to) const = 0;

  /// What an epoch of training sees of `samples`, and in which order: as many,
  /// by a function of the arguments alone. Here epoch_order(); a blend of
  /// sources takes some of them several times and others in a later epoch.
  virtual std::vector<int64_t> training_order(
      std::vector<int64_t> samples, uint64_t seed, int64_t epoch,
      bool shuffle) const;

  /// True when a sample whose load() throws DataError is to be left out.
  virtual bool may_skip() const { return false; }

  /// True when load() waits for nothing, and takes as long for each sample.
  virtual bool in_memory() const { return false; }

  /// The samples of `indices`, loaded one after the other. global_count is
  /// their number. Throws ConfigError for an index outside, else as load().
  Batch
  get(std::span<const int64_t> indices, const SampleContext& context) const;
};

/// Tensors for `n` samples of `spec`, not initialised.
Batch empty_batch(const SampleSpec& spec, int64_t n, bool pinned = false);

/// Where sample `row` of `batch` lies; `spec` as in empty_batch().
SampleMemory row_memory(const Batch& batch, const SampleSpec& spec, size_t row);

/// Leaves out the rows of `batch` whose `reasons` entry is not empty; the
/// others move up. Counts them in skipped and skip_reasons.
void drop_rows(Batch& batch, const std::vector<std::string>& reasons);

/// The samples of options.path (or built-in ones), held-out ones included.
///
///   digits   float32 [1, 8, 8], ink / 16, so 0 to 1; target 0 to 9
///   dummy    float32 options.shape, uniform with mean 0 and variance 1, and a
///            uniform class, both functions of (seed, index), made on the fly
///   tensors  `inputs` of the file in their dtype, `targets` (integers) as
///   int64;
///            the file is mapped, not read
///   images   float32 [3, image_size, image_size], normalised; the class folder
///   text     int64 [sequence] tokens; the tokens that follow each, -100 where
///            that begins another document and borders are respected; then
///            `more` has the documents (text.h)
///
/// Throws as inspect_data().
std::unique_ptr<Dataset>
make_dataset(const DataOptions& options, uint64_t seed);

/// Training data and held-out data as `options` has them.
struct TrainingData {
  std::shared_ptr<const Dataset> train;
  std::vector<int64_t> train_samples;      // dataset indices, ascending
  std::shared_ptr<const Dataset> holdout;  // train, or that of holdout_path
  std::vector<int64_t> holdout_samples;
};

TrainingData open_data(const DataOptions& options, uint64_t seed);

}  // namespace echelon
