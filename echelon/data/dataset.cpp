// This file has the kinds of data sets and what they share: the memory of a
// batch, the skipping of broken samples, the split into training and held-out
// samples. load() writes one sample into memory that the caller owns, so that
// threads fill the rows of one batch side by side. A data set does not change
// while it loads; decoders and their buffers belong to the thread. What is
// random is a function of the seed, the epoch and the sample's index.
#include "echelon/data/dataset.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/data/images/image.h"
#include "echelon/data/sources/csv_table.h"
#include "echelon/data/sources/digits.h"
#include "echelon/data/sources/image_folder.h"
#include "echelon/data/sources/image_shards.h"
#include "echelon/data/sources/inspect.h"
#include "echelon/data/sources/order.h"
#include "echelon/data/sources/random.h"
#include "echelon/data/sources/text.h"
#include "echelon/error.h"
#include "echelon/storage/local_copy.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

void put_class(int64_t label, std::byte* target) {
  std::memcpy(target, &label, sizeof(label));
}

class DigitsDataset : public Dataset {
 public:
  DigitsDataset() : digits_(load_digits()) {}

  int64_t size() const override { return Digits::kSamples; }
  SampleSpec spec() const override {
    return {
        .input_shape = {1, Digits::kSize, Digits::kSize},
        .classes = Digits::kClasses};
  }
  bool in_memory() const override { return true; }
  void load(int64_t index, const SampleContext&, const SampleMemory& to)
      const override {
    const auto& pixels = digits_.pixels[static_cast<size_t>(index)];
    auto* ink = reinterpret_cast<float*>(to.input);
    for (size_t i = 0; i < pixels.size(); ++i) {
      ink[i] = static_cast<float>(pixels[i]) / Digits::kMaxInk;
    }
    put_class(digits_.labels[static_cast<size_t>(index)], to.target);
  }

 private:
  Digits digits_;
};

/// Two rounds of a 32-bit mixer per number, without state, so that compilers
/// vectorise the loop.
/// With target_clones the loader chooses a version before a sanitizer's runtime
/// has started, so sanitizers get the plain loop.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__) && defined(__GNUC__)
__attribute__((target_clones("avx2", "default")))
#endif
void fill_uniform(float* to, int64_t count, uint32_t key, uint32_t other_key) {
  // A uniform distribution of half width sqrt(3) has variance 1.
  constexpr float kStep = 1.7320508f / (1 << 23);  // half width: sqrt(3)
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9e3779b9u + key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x ^= (x >> 16) ^ other_key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    x ^= x >> 16;
    // 24 bits, centred: -2^23 + 0.5 .. 2^23 - 0.5.
    const auto centred = static_cast<int32_t>(x >> 8) - (1 << 23);
    to[i] = (static_cast<float>(centred) + 0.5f) * kStep;
  }
}

class DummyDataset : public Dataset {
 public:
  DummyDataset(const DataOptions& options, uint64_t seed)
      : options_(options),
        seed_(seed),
        elements_(c10::multiply_integers(options.shape)) {}

  int64_t size() const override { return options_.samples; }
  SampleSpec spec() const override {
    return {.input_shape = options_.shape, .classes = options_.classes};
  }
  bool in_memory() const override { return true; }
  void load(int64_t index, const SampleContext&, const SampleMemory& to)
      const override {
    RandomStream random(
        RandomUse::dummy, {seed_, static_cast<uint64_t>(index)});
    put_class(
        static_cast<int64_t>(
            random.below(static_cast<uint64_t>(options_.classes))),
        to.target);
    const uint64_t key = random.bits();
    fill_uniform(
        reinterpret_cast<float*>(to.input), elements_,
        static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  }

 private:
  DataOptions options_;
  uint64_t seed_;
  int64_t elements_;
};

class TensorsDataset : public Dataset {
 public:
  TensorsDataset(const std::string& path, int64_t classes) : path_(path) {
    auto tensors =
        is_table(path)
            ? tensors_of_table(path)
            : load_tensors(storage::local_copy(path), {"inputs", "targets"});
    inputs_ = std::move(tensors[0]);
    targets_ = tensors[1].to(torch::kInt64);
    spec_.input_shape = inputs_.sizes().slice(1).vec();
    spec_.input_dtype = inputs_.scalar_type();
    spec_.target_shape = targets_.sizes().slice(1).vec();
    spec_.classes = classes;
    input_bytes_ = bytes_of_row(inputs_);
    target_bytes_ = bytes_of_row(targets_);
  }

  int64_t size() const override { return inputs_.size(0); }
  SampleSpec spec() const override { return spec_; }
  bool in_memory() const override { return true; }
  std::vector<std::pair<std::string, std::string>>
  fingerprints() const override {
    std::string sums;
    for (const auto& tensor : {inputs_, targets_}) {
      sums += sampled_checksum(tensor.const_data_ptr(), tensor.nbytes());
    }
    return {{path_, checksum(sums.data(), sums.size())}};
  }
  void load(int64_t index, const SampleContext&, const SampleMemory& to)
      const override {
    copy_row(inputs_, index, input_bytes_, to.input);
    copy_row(targets_, index, target_bytes_, to.target);
  }

 private:
  static std::vector<torch::Tensor> tensors_of_table(const std::string& path) {
    CsvTable table = read_table(storage::local_copy(path), path);
    const auto columns = static_cast<int64_t>(table.columns.size());
    const auto inputs = torch::from_blob(
        table.inputs.data(), {table.rows(), columns}, torch::kFloat32);
    return {
        inputs.clone(),
        torch::from_blob(table.targets.data(), {table.rows()}, torch::kInt64)
            .clone()};
  }
  static size_t bytes_of_row(const torch::Tensor& tensor) {
    return tensor.nbytes() / static_cast<size_t>(tensor.size(0));
  }
  static void copy_row(
      const torch::Tensor& tensor, int64_t index, size_t bytes, std::byte* to) {
    const auto* from = static_cast<const std::byte*>(tensor.const_data_ptr());
    std::memcpy(to, from + static_cast<size_t>(index) * bytes, bytes);
  }

  std::string path_;
  torch::Tensor inputs_;
  torch::Tensor targets_;
  SampleSpec spec_;
  size_t input_bytes_ = 0;
  size_t target_bytes_ = 0;
};

/// A JPEG is decoded at a reduced size only if the antialiasing resize still
/// shrinks it by this factor; otherwise the result is visibly sharper than that
/// of the full image.
constexpr double kLeftToResize = 2.0;

class ImagesDataset : public Dataset {
 public:
  /// `classes` gives the class folders their numbers; empty: all, in order.
  ImagesDataset(
      const DataOptions& options, const std::string& root,
      const std::vector<std::string>& classes)
      : options_(options),
        path_(root),
        in_shards_(is_shards(root)),
        folder_(in_shards_ ? scan_image_shards(root) : scan_image_folder(root)),
        normalise_(Normalise::from(options.mean, options.std)) {
    if (classes.empty()) return;
    if (in_shards_) {  // whose classes are numbers
      folder_.classes = classes;
      return;
    }
    for (auto& image : folder_.images) {
      const auto& name = folder_.classes[static_cast<size_t>(image.label)];
      // inspect_data() has refused class folders that `classes` lacks.
      image.label = std::lower_bound(classes.begin(), classes.end(), name) -
                    classes.begin();
    }
    folder_.classes = classes;
  }

  const std::vector<std::string>& classes() const { return folder_.classes; }

  int64_t size() const override {
    return static_cast<int64_t>(folder_.images.size());
  }
  SampleSpec spec() const override {
    return {
        .input_shape = {3, options_.image_size, options_.image_size},
        .classes = static_cast<int64_t>(folder_.classes.size())};
  }
  bool may_skip() const override {
    return options_.bad_image == BadImage::skip;
  }
  std::vector<std::pair<std::string, std::string>>
  fingerprints() const override {
    if (!in_shards_) return {};
    std::string all;
    for (const auto& image : folder_.images) {
      all += format(
          "{} {} {} {}\n", image.path, image.offset, image.bytes, image.label);
    }
    return {{path_, checksum(all.data(), all.size())}};
  }
  void load(int64_t index, const SampleContext& context, const SampleMemory& to)
      const override {
    thread_local ImageDecoder decoder;
    thread_local Resizer resizer;
    const auto& image = folder_.images[static_cast<size_t>(index)];
    const auto size = decoder.open(
        in_shards_ ? image.path : folder_.root + "/" + image.path,
        options_.max_image_pixels, {image.offset, image.bytes});
    const ResizePlan plan = plan_for(size, context, index);
    resizer.run(
        decoder.decode(plan.shrink() / kLeftToResize), plan,
        options_.image_size, normalise_, reinterpret_cast<float*>(to.input));
    put_class(image.label, to.target);
  }

 private:
  ResizePlan plan_for(
      ImageDecoder::Size size, const SampleContext& context,
      int64_t index) const {
    if (!context.training) return center_plan(size, options_.image_size);
    if (options_.crop == Crop::random_resized) {
      return random_plan(
          size, options_.image_size, options_.flip, context.seed, context.epoch,
          index);
    }
    ResizePlan plan = center_plan(size, options_.image_size);
    RandomStream random(
        RandomUse::augment, {context.seed, static_cast<uint64_t>(context.epoch),
                             static_cast<uint64_t>(index)});
    plan.flip = options_.flip && random.uniform() < 0.5;
    return plan;
  }

  DataOptions options_;
  std::string path_;
  bool in_shards_;
  ImageFolder folder_;
  Normalise normalise_;
};

class TextDataset : public Dataset {
 public:
  explicit TextDataset(TextCorpus corpus) : corpus_(std::move(corpus)) {}

  const TextCorpus& corpus() const { return corpus_; }

  int64_t size() const override { return corpus_.num_samples(); }
  SampleSpec spec() const override {
    const std::vector<int64_t> shape = {corpus_.sequence()};
    SampleSpec spec{
        .input_shape = shape,
        .input_dtype = torch::kInt64,
        .target_shape = shape,
        .classes = corpus_.vocabulary()};
    spec.every_target_counts =
        !corpus_.respects_documents() && !corpus_.has_masks();
    if (corpus_.respects_documents()) spec.more.push_back({shape});
    return spec;
  }
  void load(int64_t index, const SampleContext&, const SampleMemory& to)
      const override {
    const auto numbers = [](std::byte* memory) {
      return reinterpret_cast<int64_t*>(memory);
    };
    corpus_.read(
        index, numbers(to.input), numbers(to.target),
        to.more.empty() ? nullptr : numbers(to.more[0]));
  }
  std::vector<int64_t> training_order(
      std::vector<int64_t> samples, uint64_t seed, int64_t epoch,
      bool shuffle) const override {
    return corpus_.training_order(std::move(samples), seed, epoch, shuffle);
  }
  std::vector<std::pair<std::string, std::string>>
  fingerprints() const override {
    return corpus_.fingerprints();
  }

 private:
  TextCorpus corpus_;
};

std::vector<int64_t> all_of(const Dataset& dataset) {
  std::vector<int64_t> indices(static_cast<size_t>(dataset.size()));
  std::iota(indices.begin(), indices.end(), int64_t{0});
  return indices;
}

std::string type_name(const torch::Tensor& tensor) {
  return tensor.defined() ? format(
                                "{} {}", c10::toString(tensor.scalar_type()),
                                safetensors::shape_string(tensor.sizes().vec()))
                          : "nothing";
}

void copy_tensor(
    const torch::Tensor& from, const std::vector<int64_t>& shape,
    torch::Dtype dtype, std::byte* to, const std::string& name) {
  const bool fits = from.defined() && from.sizes() == at::IntArrayRef(shape) &&
                    from.is_floating_point() == c10::isFloatingType(dtype);
  if (!fits) {
    throw DataError(format(
        "{} is {}; the data set's spec() says {} {}, and every sample has the "
        "same shape",
        name, type_name(from), c10::toString(dtype),
        safetensors::shape_string(shape)));
  }
  at::from_blob(to, shape, torch::dtype(dtype)).copy_(from.detach());
}

std::unique_ptr<Dataset>
make_checked(const DataOptions& options, uint64_t seed, int64_t classes) {
  if (options.name == DataKind::digits)
    return std::make_unique<DigitsDataset>();
  if (options.name == DataKind::dummy) {
    return std::make_unique<DummyDataset>(options, seed);
  }
  if (options.name == DataKind::tensors) {
    return std::make_unique<TensorsDataset>(options.path, classes);
  }
  return std::make_unique<ImagesDataset>(
      options, options.path, std::vector<std::string>{});
}

TrainingData split_data(std::shared_ptr<const Dataset> train, Split split) {
  return {train, std::move(split.train), train, std::move(split.holdout)};
}

TrainingData with_holdout(
    std::shared_ptr<const Dataset> train,
    std::shared_ptr<const Dataset> holdout) {
  return {train, all_of(*train), holdout, all_of(*holdout)};
}

TrainingData open_text(const DataOptions& options, uint64_t seed) {
  const auto train = std::make_shared<TextDataset>(TextCorpus(options));
  const TextCorpus& corpus = train->corpus();
  if (options.holdout_path.empty()) {
    return split_data(train, corpus.split(options.holdout, seed));
  }
  return with_holdout(
      train, std::make_shared<TextDataset>(TextCorpus(options, corpus)));
}

}  // namespace

Batch empty_batch(const SampleSpec& spec, int64_t n, bool pinned) {
  const auto make = [&](std::vector<int64_t> shape, torch::Dtype dtype) {
    shape.insert(shape.begin(), n);
    return torch::empty(
        shape, torch::TensorOptions().dtype(dtype).pinned_memory(pinned));
  };
  Batch batch;
  batch.inputs = make(spec.input_shape, spec.input_dtype);
  batch.targets = make(spec.target_shape, spec.target_dtype);
  for (const auto& more : spec.more) {
    batch.more.push_back(make(more.shape, more.dtype));
  }
  for (const auto& more : spec.more_targets) {
    batch.more_targets.push_back(make(more.shape, more.dtype));
  }
  batch.ids = spec.ids;
  batch.global_count = n;
  return batch;
}

SampleMemory
row_memory(const Batch& batch, const SampleSpec& spec, size_t row) {
  const auto at = [&](const torch::Tensor& tensor) {
    const size_t bytes = tensor.nbytes() / static_cast<size_t>(tensor.size(0));
    return static_cast<std::byte*>(tensor.data_ptr()) + row * bytes;
  };
  SampleMemory memory{at(batch.inputs), at(batch.targets), {}, {}};
  for (size_t i = 0; i < spec.more.size(); ++i) {
    memory.more.push_back(at(batch.more[i]));
  }
  for (const auto& more : batch.more_targets) {
    memory.more_targets.push_back(at(more));
  }
  return memory;
}

void copy_sample(
    const Sample& sample, const SampleSpec& spec, const SampleMemory& to,
    const std::string& name) {
  const torch::NoGradGuard no_grad;
  copy_tensor(
      sample.input, spec.input_shape, spec.input_dtype, to.input,
      "the input of " + name);
  copy_tensor(
      sample.target, spec.target_shape, spec.target_dtype, to.target,
      "the target of " + name);
  const auto copy_more = [&](const std::vector<torch::Tensor>& tensors,
                             const std::vector<MoreSpec>& specs,
                             const std::vector<std::byte*>& memory,
                             const std::string& what) {
    if (tensors.size() != specs.size()) {
      throw DataError(format(
          "{} has {}, and the data set's spec() says {}", name,
          counted(static_cast<int64_t>(tensors.size()), "further " + what),
          specs.size()));
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      copy_tensor(
          tensors[i], specs[i].shape, specs[i].dtype, memory[i],
          format("further {} {} of {}", what, i, name));
    }
  };
  copy_more(sample.more, spec.more, to.more, "input");
  copy_more(sample.more_targets, spec.more_targets, to.more_targets, "target");
}

void drop_rows(Batch& batch, const std::vector<std::string>& reasons) {
  const auto n = static_cast<size_t>(batch.inputs.size(0));
  std::vector<torch::Tensor*> tensors = {&batch.inputs, &batch.targets};
  for (auto& tensor : batch.more) tensors.push_back(&tensor);
  for (auto& tensor : batch.more_targets) tensors.push_back(&tensor);
  size_t kept = 0;
  for (size_t row = 0; row < n; ++row) {
    if (!reasons[row].empty()) {
      ++batch.skipped;
      batch.skip_reasons.push_back(reasons[row]);
      continue;
    }
    // kept <= row: no row is overwritten before it has been moved.
    for (const auto* tensor : tensors) {
      const size_t bytes = tensor->nbytes() / n;
      auto* data = static_cast<std::byte*>(tensor->data_ptr());
      std::memmove(data + kept * bytes, data + row * bytes, bytes);
    }
    batch.indices[kept++] = batch.indices[row];
  }
  if (kept == n) return;
  for (auto* tensor : tensors) {
    *tensor = tensor->narrow(0, 0, static_cast<int64_t>(kept));
  }
  batch.indices.resize(kept);
}

std::vector<int64_t> Dataset::training_order(
    std::vector<int64_t> samples, uint64_t seed, int64_t epoch,
    bool shuffle) const {
  return epoch_order(std::move(samples), seed, epoch, shuffle);
}

int64_t SampleStream::skip(int64_t count) {
  int64_t skipped = 0;
  for (; skipped < count; ++skipped) {
    try {
      if (!next()) break;
    } catch (const DataError&) {
      // The rank that takes this sample reports it.
    }
  }
  return skipped;
}

void SampleStream::seek(const std::string& position) {
  throw DataError(format(
      "the data's stream returns positions, as \"{}\", and does not override "
      "seek(), which goes to them",
      position));
}

void Dataset::load(
    int64_t index, const SampleContext& context, const SampleMemory& to) const {
  const std::string name = format("sample {}", index);
  try {
    copy_sample(sample(index, context), spec(), to, name);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw DataError(format("{} of the data set: {}", name, error.what()));
  }
}

Sample Dataset::sample(int64_t index, const SampleContext&) const {
  throw ConfigError(format(
      "sample {}: the data set overrides neither sample() nor load()", index));
}

std::unique_ptr<SampleStream> Dataset::open(const SampleContext&) const {
  throw ConfigError("the data set is a stream and does not override open()");
}

Batch Dataset::get(
    std::span<const int64_t> indices, const SampleContext& context) const {
  const SampleSpec sample = spec();
  Batch batch = empty_batch(sample, static_cast<int64_t>(indices.size()));
  batch.indices.assign(indices.begin(), indices.end());
  std::vector<std::string> reasons(indices.size());
  for (size_t row = 0; row < indices.size(); ++row) {
    if (indices[row] < 0 || indices[row] >= size()) {
      throw ConfigError(format(
          "sample {} is outside of the data set's {}", indices[row], size()));
    }
    try {
      load(indices[row], context, row_memory(batch, sample, row));
    } catch (const DataError& error) {
      if (!may_skip()) throw;
      reasons[row] = error.what();
    }
  }
  drop_rows(batch, reasons);
  return batch;
}

std::unique_ptr<Dataset>
make_dataset(const DataOptions& options, uint64_t seed) {
  if (options.name == DataKind::text) {
    return std::make_unique<TextDataset>(TextCorpus(options));
  }
  return make_checked(options, seed, inspect_data(options).classes);
}

TrainingData open_data(const DataOptions& options, uint64_t seed) {
  if (options.name == DataKind::text) return open_text(options, seed);
  const int64_t classes = inspect_data(options).classes;
  const std::shared_ptr<const Dataset> train =
      make_checked(options, seed, classes);
  if (options.holdout_path.empty()) {
    return split_data(
        train, split_samples(train->size(), options.holdout, seed));
  }
  if (options.name == DataKind::tensors) {
    return with_holdout(
        train, std::make_shared<TensorsDataset>(options.holdout_path, classes));
  }
  const auto& images = dynamic_cast<const ImagesDataset&>(*train);
  return with_holdout(
      train, std::make_shared<ImagesDataset>(
                 options, options.holdout_path, images.classes()));
}

TrainingData split_own(
    std::shared_ptr<const Dataset> train,
    std::shared_ptr<const Dataset> holdout, const DataOptions& options,
    uint64_t seed) {
  const auto samples_of = [](const Dataset& dataset) {
    if (!dataset.is_stream() && dataset.size() < 1) {
      throw ConfigError(format(
          "the data set has {} samples; training needs at least one, and only "
          "a stream (is_stream) may not know its size",
          dataset.size()));
    }
    return dataset.is_stream() ? std::vector<int64_t>() : all_of(dataset);
  };
  auto samples = samples_of(*train);
  if (!holdout) {
    if (train->is_stream()) return {train, {}, train, {}};
    return split_data(
        train, split_samples(train->size(), options.holdout, seed));
  }
  const SampleSpec one = train->spec();
  const SampleSpec other = holdout->spec();
  if (one.input_shape != other.input_shape ||
      one.target_shape != other.target_shape) {
    throw ConfigError(format(
        "the held-out samples are {} with targets {}, those for training {} "
        "with targets {}; they must be equal",
        safetensors::shape_string(other.input_shape),
        safetensors::shape_string(other.target_shape),
        safetensors::shape_string(one.input_shape),
        safetensors::shape_string(one.target_shape)));
  }
  auto held_out = samples_of(*holdout);
  return {train, std::move(samples), holdout, std::move(held_out)};
}

}  // namespace echelon
