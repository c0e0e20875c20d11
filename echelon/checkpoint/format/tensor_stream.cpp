// Tensors pass through memory of a fixed size: parts are collected until it is
// full, then read together, which lets the source read each of its blocks once,
// converted where dtypes differ, and appended.
#include "echelon/checkpoint/format/tensor_stream.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/new_file.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using safetensors::quote_printable;

int64_t width(const std::string& dtype) {
  return static_cast<int64_t>(safetensors::dtype_bytes(dtype));
}

// "[2, 0]", the indices of element number `element`.
std::string place_of(const std::vector<int64_t>& shape, int64_t element) {
  std::vector<int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return safetensors::shape_string(index);
}

[[noreturn]] void refuse_overflow(
    const TensorSource& source, const TensorFacts& facts,
    const std::string& dtype, int64_t element, const std::byte* value) {
  double number = 0;
  convert_floats(
      facts.dtype, value, "F64", reinterpret_cast<std::byte*>(&number), 1);
  throw DataError(format(
      "{}: tensor {}: {:g} at {} is beyond what {} can hold, {:g}; write a "
      "wider dtype (bfloat16 has the range of float32)",
      source.path(), quote_printable(facts.name), number,
      place_of(facts.shape, element), dtype, largest_value(dtype)));
}

// The memory is not initialised, so pages that are not used never become
// resident.
using Memory = std::unique_ptr<std::byte[]>;

Memory memory(int64_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(
      static_cast<size_t>(bytes));
}

// Collects parts of tensors in the order of the file; reads, converts and
// writes them when its memory is full. The checksum of each tensor that has
// elements goes into `sums`.
class Stream {
 public:
  Stream(
      TensorSource& source, NewFile& file, int64_t bytes,
      safetensors::Metadata& sums)
      : source_(source),
        file_(file),
        sums_(sums),
        room_(std::max<int64_t>(bytes, 16)),
        read_(memory(room_)),
        converted_(memory(room_)) {}

  void add(const TensorToWrite& tensor) {
    const auto& facts = source_.tensors()[tensor.tensor];
    const bool same = facts.dtype == tensor.dtype;
    const int64_t each = width(facts.dtype) + (same ? 0 : width(tensor.dtype));
    const int64_t numel = facts.numel();
    for (int64_t begin = 0; begin < numel;) {
      if (room_ - held_ < each) flush();
      const int64_t count =
          std::min(numel - begin, std::max<int64_t>((room_ - held_) / each, 1));
      parts_.push_back({&tensor, {begin, begin + count}, !same});
      held_ += count * each;
      begin += count;
    }
  }

  void flush() {
    if (parts_.empty()) return;
    std::vector<TensorSource::Piece> pieces;
    std::byte* to = read_.get();
    for (const auto& part : parts_) {
      pieces.push_back({part.tensor->tensor, part.elements, to});
      to += bytes_of(part);
    }
    source_.read(pieces);
    for (size_t i = 0; i < parts_.size(); ++i) write(parts_[i], pieces[i].to);
    file_.start_writing();
    parts_.clear();
    held_ = 0;
  }

 private:
  struct Part {
    const TensorToWrite* tensor;
    IndexRange elements;
    bool converts;
  };

  const TensorFacts& facts(const Part& part) const {
    return source_.tensors()[part.tensor->tensor];
  }
  int64_t bytes_of(const Part& part) const {
    return part.elements.size() * width(facts(part).dtype);
  }

  void write(const Part& part, const std::byte* bytes) {
    if (!part.converts) return append(part, bytes, bytes_of(part));
    const auto& dtype = part.tensor->dtype;
    const int64_t count = part.elements.size();
    const int64_t wrong = convert_floats(
        facts(part).dtype, bytes, dtype, converted_.get(), count);
    if (wrong < count) {
      refuse_overflow(
          source_, facts(part), dtype, part.elements.begin + wrong,
          bytes + wrong * width(facts(part).dtype));
    }
    append(part, converted_.get(), count * width(dtype));
  }

  void append(const Part& part, const std::byte* data, int64_t bytes) {
    file_.append(data, static_cast<size_t>(bytes));
    sum_.update(data, static_cast<size_t>(bytes));
    if (part.elements.end < facts(part).numel()) return;
    sums_[safetensors::checksum_key(part.tensor->name)] = sum_.digest();
  }

  TensorSource& source_;
  NewFile& file_;
  safetensors::Metadata& sums_;
  ChecksumStream sum_;  // of the tensor that is being written
  int64_t room_;
  int64_t held_ = 0;  // bytes of parts_, read and converted
  std::vector<Part> parts_;
  Memory read_;
  Memory converted_;
};

void check(
    const std::string& path, const TensorSource& source,
    const TensorToWrite& tensor) {
  const auto& facts = source.tensors().at(tensor.tensor);
  if (facts.dtype == tensor.dtype) return;
  if (is_float_dtype(facts.dtype) && is_float_dtype(tensor.dtype)) return;
  throw ConfigError(format(
      "{}: tensor {}: {} is not converted to {}; only floating-point dtypes "
      "are, F64, F32, F16 and BF16",
      path, quote_printable(tensor.name), facts.dtype, tensor.dtype));
}

}  // namespace

int64_t TensorFacts::numel() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

int64_t
bytes_to_write(const TensorSource& source, const TensorToWrite& tensor) {
  return source.tensors().at(tensor.tensor).numel() * width(tensor.dtype);
}

void write_tensors(
    const std::string& path, TensorSource& source,
    const std::vector<TensorToWrite>& tensors,
    const safetensors::Metadata& metadata, int64_t memory_bytes) {
  // The file is planned by sizes alone; nobody looks at these bytes.
  static constexpr std::byte kNowhere{};
  std::vector<safetensors::TensorBytes> list;
  std::map<std::string, const TensorToWrite*> by_name;
  safetensors::Metadata with_sums = metadata;
  for (const auto& tensor : tensors) {
    check(path, source, tensor);
    const auto bytes = static_cast<size_t>(bytes_to_write(source, tensor));
    list.push_back(
        {tensor.name,
         tensor.dtype,
         source.tensors()[tensor.tensor].shape,
         {&kNowhere, bytes}});
    by_name[tensor.name] = &tensor;
    with_sums[safetensors::checksum_key(tensor.name)] = checksum(nullptr, 0);
  }
  const auto plan = safetensors::plan_file(path, list, with_sums);
  NewFile file(path, plan.bytes, NewFile::Under::beside);
  file.append(plan.head.data(), plan.head.size());
  Stream stream(source, file, memory_bytes, with_sums);
  for (const auto* tensor : plan.order) stream.add(*by_name.at(tensor->name));
  stream.flush();
  // The checksums are known now; the head is as long as it was.
  const auto head = safetensors::plan_file(path, list, with_sums).head;
  file.rewrite_start(head.data(), head.size());
  file.move_into_place();
}

}  // namespace echelon
