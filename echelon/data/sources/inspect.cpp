#include "echelon/data/sources/inspect.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/data/sources/csv_table.h"
#include "echelon/data/sources/digits.h"
#include "echelon/data/sources/image_folder.h"
#include "echelon/data/sources/image_shards.h"
#include "echelon/data/sources/order.h"
#include "echelon/data/sources/text.h"
#include "echelon/error.h"
#include "echelon/storage/local_copy.h"
#include "echelon/storage/settings.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

using safetensors::shape_string;

void require_positive(int64_t value, const std::string& key) {
  if (value < 1) {
    throw ConfigError(format("[data] {}={}: must be 1 or more", key, value));
  }
}

void require_path(const DataOptions& options, const std::string& what) {
  if (options.path.empty()) {
    throw ConfigError(format(
        "[data] name=\"{}\" needs path: {}", to_string(options.name), what));
  }
}

void check_loading(const DataOptions& options) {
  require_positive(options.workers, "workers");
  require_positive(options.prefetch, "prefetch");
  num_holdout(2, options.holdout);  // throws when it is out of range
}

void check_images(const DataOptions& options) {
  require_positive(options.image_size, "image_size");
  require_positive(options.max_image_pixels, "max_image_pixels");
  constexpr int64_t kMaxSize = 16384;
  if (options.image_size > kMaxSize) {
    throw ConfigError(format(
        "[data] image_size={}: must be {} or less", options.image_size,
        kMaxSize));
  }
  if (options.mean.size() != 3 || options.std.size() != 3) {
    throw ConfigError(format(
        "[data] mean has {} and std {} numbers; images have 3 channels, so "
        "each needs 3",
        options.mean.size(), options.std.size()));
  }
  for (const double value : options.mean) {
    if (!std::isfinite(value)) {
      throw ConfigError("[data] mean holds a number that is not finite");
    }
  }
  for (const double value : options.std) {
    if (!(value > 0.0 && std::isfinite(value))) {
      throw ConfigError(
          format("[data] std holds {:f}; each must be more than 0", value));
    }
  }
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return shape.empty() ? "scalars" : join(shape, "x");
}

std::string counted(int64_t number, const char* one, const char* many) {
  return format("{} {}", number, number == 1 ? one : many);
}

DataFacts dummy_facts(const DataOptions& options) {
  require_positive(options.samples, "samples");
  require_positive(options.classes, "classes");
  if (options.shape.empty()) {
    throw ConfigError("[data] shape=[]: needs one number or more");
  }
  int64_t elements = 1;
  for (const int64_t dim : options.shape) {
    require_positive(dim, "shape");
    if (__builtin_mul_overflow(elements, dim, &elements) ||
        elements > std::numeric_limits<int32_t>::max()) {
      throw ConfigError(format(
          "[data] shape={}: a sample must have fewer than 2^31 elements",
          shape_string(options.shape)));
    }
  }
  return {
      .num_samples = options.samples,
      .sample_shape = options.shape,
      .classes = options.classes,
      .describe = counted(options.samples, "random image", "random images")};
}

/// Largest target plus one.
template <typename Int>
int64_t
count_classes(std::span<const std::byte> bytes, const std::string& path) {
  int64_t largest = -1;
  for (size_t i = 0; i < bytes.size() / sizeof(Int); ++i) {
    Int value;
    std::memcpy(&value, bytes.data() + i * sizeof(Int), sizeof(Int));
    // A negative number is huge as an unsigned one.
    if (static_cast<uint64_t>(value) >= uint64_t{1} << 31) {
      throw DataError(format(
          "{}: targets holds {} (element {}); classes are 0 or more and below "
          "2^31",
          path, int64_t{value}, i));
    }
    largest = std::max(largest, static_cast<int64_t>(value));
  }
  return largest + 1;
}

int64_t count_classes(
    const safetensors::File& file, const safetensors::TensorInfo& targets) {
  const auto bytes = file.bytes(targets);
  const std::string& dtype = targets.dtype;
  if (dtype == "I64") return count_classes<int64_t>(bytes, file.path());
  if (dtype == "I32") return count_classes<int32_t>(bytes, file.path());
  if (dtype == "I16") return count_classes<int16_t>(bytes, file.path());
  if (dtype == "I8") return count_classes<int8_t>(bytes, file.path());
  if (dtype == "U8") return count_classes<uint8_t>(bytes, file.path());
  throw DataError(format(
      "{}: targets are {}; classes are integers: I64, I32, I16, I8 or U8",
      file.path(), dtype));
}

DataFacts table_facts(const std::string& path) {
  const CsvTable table = read_table(storage::local_copy(path), path);
  return {
      .num_samples = table.rows(),
      .sample_shape = {static_cast<int64_t>(table.columns.size())},
      .classes = table.classes,
      .describe = counted(table.rows(), "sample", "samples")};
}

DataFacts tensors_facts(const std::string& path) {
  if (is_table(path)) return table_facts(path);
  try {
    const safetensors::File file(storage::local_copy(path));
    const auto& inputs = file.at("inputs");
    const auto& targets = file.at("targets");
    for (const auto* tensor : {&inputs, &targets}) {
      if (tensor->shape.empty()) {
        throw DataError(format(
            "{}: {} is a scalar; its first dimension must count the samples",
            path, tensor->name));
      }
    }
    if (inputs.shape[0] != targets.shape[0]) {
      throw DataError(format(
          "{}: inputs {} has {} samples, targets {} has {}; they must be as "
          "many",
          path, shape_string(inputs.shape), inputs.shape[0],
          shape_string(targets.shape), targets.shape[0]));
    }
    if (inputs.shape[0] == 0) {
      throw DataError(path + ": inputs and targets are empty");
    }
    if (inputs.dtype == "BOOL" || inputs.dtype == "C64" ||
        inputs.dtype.starts_with("F8")) {
      throw DataError(format(
          "{}: inputs are {}; use F32, F64, F16, BF16 or integers", path,
          inputs.dtype));
    }
    return {
        .num_samples = inputs.shape[0],
        .sample_shape = {inputs.shape.begin() + 1, inputs.shape.end()},
        .classes = count_classes(file, targets),
        .describe = counted(inputs.shape[0], "sample", "samples")};
  } catch (const CheckpointError& error) {
    throw DataError(error.what());
  }
}

DataFacts image_facts(const std::string& path, int64_t image_size) {
  if (storage::is_object_url(path)) {
    throw DataError(
        path +
        ": images are read from a folder or tar files on a disk; copy them "
        "there (aws s3 sync), or store them as tensors in one .safetensors "
        "file");
  }
  const ImageFolder folder =
      is_shards(path) ? scan_image_shards(path) : scan_image_folder(path);
  const auto images = static_cast<int64_t>(folder.images.size());
  return {
      .num_samples = images,
      .sample_shape = {3, image_size, image_size},
      .classes = static_cast<int64_t>(folder.classes.size()),
      .describe = counted(images, "image", "images")};
}

void check_same_classes(const DataOptions& options) {
  if (is_shards(options.path) != is_shards(options.holdout_path)) {
    throw DataError(format(
        "{}: both it and {} must be tar files, or folders: classes are numbers "
        "in the one and names in the other",
        options.holdout_path, options.path));
  }
  if (is_shards(options.path)) return;
  const auto train = scan_image_folder(options.path);
  const auto holdout = scan_image_folder(options.holdout_path);
  for (const auto& name : holdout.classes) {
    if (!std::binary_search(train.classes.begin(), train.classes.end(), name)) {
      throw DataError(format(
          "{}/{}: {} has no class of that name; both folders must use the same "
          "names",
          options.holdout_path, name, options.path));
    }
  }
}

DataFacts main_facts(const DataOptions& options) {
  if (options.name == DataKind::digits) {
    return {
        .num_samples = Digits::kSamples,
        .sample_shape = {1, Digits::kSize, Digits::kSize},
        .classes = Digits::kClasses,
        .describe = "1797 digits"};
  }
  if (options.name == DataKind::dummy) return dummy_facts(options);
  if (options.name == DataKind::tensors) {
    require_path(
        options,
        "a .safetensors file with inputs and targets, or a .csv or .parquet "
        "file with a column target");
    return tensors_facts(options.path);
  }
  check_images(options);
  require_path(
      options, "a folder with one folder of images per class, or tar files");
  return image_facts(options.path, options.image_size);
}

DataFacts text_facts(const DataOptions& options) {
  const TextCorpus corpus(options);
  DataFacts facts;
  facts.num_samples = corpus.num_samples();
  facts.sample_shape = {corpus.sequence()};
  facts.classes = corpus.vocabulary();
  if (options.holdout_path.empty()) {
    const Split split = corpus.split(options.holdout, 0);
    facts.num_train = static_cast<int64_t>(split.train.size());
    facts.num_holdout = static_cast<int64_t>(split.holdout.size());
  } else {
    facts.num_train = facts.num_samples;
    facts.num_holdout = TextCorpus(options, corpus).num_samples();
  }
  facts.describe = format(
      "{}, vocabulary {}, {} of {}", corpus.describe(), facts.classes,
      counted(facts.num_samples, "sample", "samples"), corpus.sequence());
  return facts;
}

/// The number of held-out samples in holdout_path.
int64_t holdout_samples(const DataOptions& options, const DataFacts& facts) {
  DataFacts other;
  if (options.name == DataKind::tensors) {
    other = tensors_facts(options.holdout_path);
  } else if (options.name == DataKind::images) {
    other = image_facts(options.holdout_path, options.image_size);
    check_same_classes(options);
  } else {
    throw ConfigError(format(
        "[data] holdout_path is for tensors, images and text; name=\"{}\" "
        "holds out a part of its own: use holdout",
        to_string(options.name)));
  }
  if (other.sample_shape != facts.sample_shape) {
    throw DataError(format(
        "{}: its samples are {}, those of {} are {}; they must be equal",
        options.holdout_path, shape_string(other.sample_shape), options.path,
        shape_string(facts.sample_shape)));
  }
  if (other.classes > facts.classes) {
    throw DataError(format(
        "{}: holds class {}, but {} has classes 0 to {}", options.holdout_path,
        other.classes - 1, options.path, facts.classes - 1));
  }
  return other.num_samples;
}

}  // namespace

DataFacts inspect_data(const DataOptions& options) {
  check_loading(options);
  if (options.name == DataKind::own) {
    throw ConfigError(
        "[data] name=\"own\": the data set is a program's, which hands it to "
        "train(), or a library's; name the library in [model] library");
  }
  if (options.name == DataKind::text) return text_facts(options);
  DataFacts facts = main_facts(options);
  if (options.holdout_path.empty()) {
    facts.num_holdout = num_holdout(facts.num_samples, options.holdout);
    facts.num_train = facts.num_samples - facts.num_holdout;
  } else {
    facts.num_holdout = holdout_samples(options, facts);
    facts.num_train = facts.num_samples;
  }
  facts.describe += format(
      ", {}, {}", counted(facts.classes, "class", "classes"),
      shape_text(facts.sample_shape));
  return facts;
}

}  // namespace echelon
