// A data set: samples by index, or one after the other, ready for the model.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "echelon/options/data.h"

namespace echelon {

/// One rank's part of a global batch.
struct Batch {
  torch::Tensor inputs;   // [n, input_shape...]
  torch::Tensor targets;  // [n, target_shape...]
  /// Further arguments of the model's first layer, each [n, ...]:
  ///   documents  int64 [n, sequence], where text is packed and document
  ///              borders are respected: tokens attend to their own document
  ///   keys       int64 [n], where the model has dropout: the seeds of random
  ///              masks, functions of the seed, the epoch and the sample.
  ///              Always the last.
  std::vector<torch::Tensor> more;
  std::vector<torch::Tensor> more_targets;  // each [n, ...]
  bool ids = false;                         // SampleSpec::ids
  /// n dataset indices, or positions in the epoch of a stream; n may be 0.
  std::vector<int64_t> indices;
  /// Samples of the global batch over all ranks, skipped ones included. Where
  /// samples can be skipped (Dataset::may_skip), the actual number is the sum
  /// of inputs.size(0) over the ranks.
  int64_t global_count = 0;
  bool may_skip = false;                  // some rank may have left samples out
  int64_t skipped = 0;                    // broken samples of this rank
  std::vector<std::string> skip_reasons;  // one each
};

/// Calls `f` with each tensor of a batch.
template <class F>
void for_tensors(Batch& batch, const F& f) {
  f(batch.inputs);
  f(batch.targets);
  for (auto& tensor : batch.more) f(tensor);
  for (auto& tensor : batch.more_targets) f(tensor);
}

/// A random augmentation is a function of these and of the sample's index, so
/// that it does not depend on the rank, the thread or the batch.
struct SampleContext {
  uint64_t seed = 0;
  int64_t epoch = 0;
  bool training = true;  // false: no random crop or flip
};

/// One sample's part of a tensor of Batch::more or Batch::more_targets that the
/// data set fills.
struct MoreSpec {
  std::vector<int64_t> shape;
  torch::Dtype dtype = torch::kInt64;
};

/// Shapes and dtypes of one sample.
struct SampleSpec {
  std::vector<int64_t> input_shape;
  torch::Dtype input_dtype = torch::kFloat32;
  std::vector<int64_t> target_shape;  // [] for a class number
  torch::Dtype target_dtype = torch::kInt64;
  int64_t classes = 0;  // 0: targets are not class numbers
  std::vector<MoreSpec> more;
  std::vector<MoreSpec> more_targets;
  /// Inputs are numbers of things, such as tokens, and stay whole numbers;
  /// others are converted to the model's dtype. A text's always stay.
  bool ids = false;
  /// True: no target is negative, so that the loss includes every token of a
  /// text and samples of one shape have the same weight. False: the targets of
  /// each batch are counted.
  bool every_target_counts = false;
};

/// The memory that a sample is written to, contiguous, as spec() describes it.
struct SampleMemory {
  std::byte* input = nullptr;
  std::byte* target = nullptr;
  std::vector<std::byte*> more;  // one for each of SampleSpec::more
  std::vector<std::byte*> more_targets;
};

/// A sample as tensors, with the shapes of SampleSpec. Dtypes may differ where
/// both are floating-point or both are whole numbers.
struct Sample {
  torch::Tensor input;
  torch::Tensor target;
  std::vector<torch::Tensor> more;
  std::vector<torch::Tensor> more_targets;
};

/// Reads the samples of an epoch one after the other. One thread uses it.
///
/// A step's batch is divided among the data-parallel ranks by position, and
/// each rank reads a stream of its own: all of them must give the same samples
/// in the same order, whatever the number of ranks.
class SampleStream {
 public:
  virtual ~SampleStream() = default;

  /// The next sample; nothing at the end of the epoch. Throws DataError, which
  /// names the file, for a broken one; it counts as read.
  virtual std::optional<Sample> next() = 0;
  /// Passes over up to `count` samples, which another rank takes, and returns
  /// how many there were, broken ones included. By default reads them; a stream
  /// that can do it for less does.
  virtual int64_t skip(int64_t count);
  /// Where the next sample is, in a form of the stream's own, for a checkpoint.
  /// Empty, the default: a resumed run opens the epoch and skips.
  virtual std::string position() const { return {}; }
  /// Goes to what position() returned, of a stream of the same epoch.
  virtual void seek(const std::string& position);
};

/// The samples of one's own or of a file. Those that are had by index override
/// load() or, with tensors, sample(); a stream overrides open().
///
/// Implementations are safe to use from many threads at once.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// The number of samples, which does not change. A stream that does not know
  /// it returns kUnknownSize.
  virtual int64_t size() const = 0;
  static constexpr int64_t kUnknownSize = -1;
  virtual SampleSpec spec() const = 0;

  /// Writes sample `index` (in [0, size)) to `to`. Throws DataError, which
  /// names the file, when it is broken. By default copies sample() there.
  virtual void load(
      int64_t index, const SampleContext& context,
      const SampleMemory& to) const;
  /// Sample `index`, for load().
  virtual Sample sample(int64_t index, const SampleContext& context) const;

  /// True when samples come from open(), not by index.
  virtual bool is_stream() const { return false; }
  /// Opens the stream of context.epoch at its first sample. It must
  /// not outlive this data set.
  virtual std::unique_ptr<SampleStream>
  open(const SampleContext& context) const;

  /// The order in which an epoch of training visits `samples`: as many, and a
  /// function of the arguments. By default epoch_order(); a blend of sources
  /// visits some samples several times and others in a later epoch.
  virtual std::vector<int64_t> training_order(
      std::vector<int64_t> samples, uint64_t seed, int64_t epoch,
      bool shuffle) const;

  /// The name of each file or source that holds the samples, and a checksum of
  /// what it holds, by which a resumed run notices that it was replaced. Empty
  /// where the settings alone decide, and for folders of images.
  virtual std::vector<std::pair<std::string, std::string>>
  fingerprints() const {
    return {};
  }

  /// True when samples whose load() throws DataError are skipped.
  virtual bool may_skip() const { return false; }

  /// True when load() never waits, and takes the same time for each sample.
  virtual bool in_memory() const { return false; }

  /// Loads the samples of `indices` one after the other; global_count is their
  /// number. Throws ConfigError for an index out of range, otherwise as load().
  Batch
  get(std::span<const int64_t> indices, const SampleContext& context) const;
};

/// Uninitialised tensors for `n` samples of `spec`.
Batch empty_batch(const SampleSpec& spec, int64_t n, bool pinned = false);

/// The memory of sample `row` of `batch`; `spec` as in empty_batch().
SampleMemory row_memory(const Batch& batch, const SampleSpec& spec, size_t row);

/// Copies a sample to `to`. `name`, as in "sample 3", begins the DataError of a
/// tensor that is not as `spec` says.
void copy_sample(
    const Sample& sample, const SampleSpec& spec, const SampleMemory& to,
    const std::string& name);

/// Removes the rows of `batch` whose entry in `reasons` is not empty, and
/// records them in skipped and skip_reasons.
void drop_rows(Batch& batch, const std::vector<std::string>& reasons);

/// The samples of options.path (or built-in ones), held-out ones included.
///
///   digits   float32 [1, 8, 8], ink / 16, so 0 to 1; target 0 to 9
///   dummy    float32 options.shape, uniform with mean 0 and variance 1, and a
///            uniform class; both are functions of (seed, index)
///   tensors  `inputs` of the file in their dtype, `targets` (integers) as
///            int64; the file is memory-mapped
///   images   float32 [3, image_size, image_size], normalised; target: the
///            number of the class folder
///   text     int64 [sequence] tokens; targets are the next tokens, or -100
///            where the next token begins another document and borders are
///            respected: then `more` has the documents (text.h); also -100
///            where a mask leaves the next token out
///
/// Throws as inspect_data().
std::unique_ptr<Dataset>
make_dataset(const DataOptions& options, uint64_t seed);

/// Training data and held-out data.
struct TrainingData {
  std::shared_ptr<const Dataset> train;
  std::vector<int64_t> train_samples;      // dataset indices, ascending
  std::shared_ptr<const Dataset> holdout;  // train, or that of holdout_path
  std::vector<int64_t> holdout_samples;
};

TrainingData open_data(const DataOptions& options, uint64_t seed);

/// The same for data sets of one's own. Without `holdout`, options.holdout is
/// the share of `train` that is held out; nothing of a stream is. Throws
/// ConfigError for an empty data set, and where the samples of the two differ.
TrainingData split_own(
    std::shared_ptr<const Dataset> train,
    std::shared_ptr<const Dataset> holdout, const DataOptions& options,
    uint64_t seed);

}  // namespace echelon
