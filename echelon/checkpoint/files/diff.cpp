// Tensors with the same hash are equal and are not read. The others are read in
// batches of bounded memory, from both checkpoints, and compared as numbers or,
// where they are none, bit by bit.
#include "echelon/checkpoint/files/diff.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/checkpoint/format/safetensors.h"

namespace echelon {
namespace {

constexpr size_t kNumbersAtATime = 4096;

void read_numbers(
    const SavedTensor& tensor, const std::byte* from, size_t count,
    double* values) {
  convert_floats(
      tensor.dtype, from, "F64", reinterpret_cast<std::byte*>(values),
      static_cast<int64_t>(count));
}

// A range of elements of a tensor that both have, and its place in the memory
// of a batch.
struct Piece {
  TensorDiff* diff;
  const SavedTensor* a;
  const SavedTensor* b;
  IndexRange range;
  size_t begin_a;  // bytes
  size_t begin_b;
};

size_t width_of(const SavedTensor& tensor) {
  return static_cast<size_t>(safetensors::dtype_bytes(tensor.dtype));
}

void compare_numbers(
    const Piece& piece, const std::byte* a, const std::byte* b) {
  auto& diff = *piece.diff;
  const size_t width_a = width_of(*piece.a), width_b = width_of(*piece.b);
  const bool same_dtype = piece.a->dtype == piece.b->dtype;
  double values_a[kNumbersAtATime], values_b[kNumbersAtATime];
  double squares = 0, change_squares = 0;
  const auto total = static_cast<size_t>(piece.range.size());
  for (size_t begin = 0; begin < total; begin += kNumbersAtATime) {
    const size_t count = std::min(kNumbersAtATime, total - begin);
    const auto* from_a = a + begin * width_a;
    const auto* from_b = b + begin * width_b;
    read_numbers(*piece.a, from_a, count, values_a);
    read_numbers(*piece.b, from_b, count, values_b);
    for (size_t i = 0; i < count; ++i) {
      squares += values_a[i] * values_a[i];
      const bool same =
          same_dtype
              ? std::memcmp(
                    from_a + i * width_a, from_b + i * width_a, width_a) == 0
              : values_a[i] == values_b[i] ||
                    (std::isnan(values_a[i]) && std::isnan(values_b[i]));
      if (same) continue;
      ++diff.differing;
      const double change = std::abs(values_b[i] - values_a[i]);
      change_squares += change * change;
      if (!(change <= diff.largest) && !std::isnan(diff.largest)) {
        diff.largest = change;
      }
    }
  }
  diff.norm = std::hypot(diff.norm, std::sqrt(squares));
  diff.change_norm = std::hypot(diff.change_norm, std::sqrt(change_squares));
}

void compare_bits(const Piece& piece, const std::byte* a, const std::byte* b) {
  const size_t width = width_of(*piece.a);
  const auto total = static_cast<size_t>(piece.range.size());
  for (size_t i = 0; i < total; ++i) {
    const size_t at = i * width;
    piece.diff->differing += std::memcmp(a + at, b + at, width) != 0;
  }
}

// Pieces of many small tensors, or of one large tensor, that are read together.
class Batch {
 public:
  Batch(CheckpointReader& a, CheckpointReader& b, size_t bytes)
      : a_(a), b_(b), bytes_(bytes) {}

  size_t room() const {
    return bytes_ - std::min(bytes_, std::max(size_a_, size_b_));
  }
  bool empty() const { return pieces_.empty(); }

  void
  add(TensorDiff& diff, const SavedTensor& a, const SavedTensor& b,
      const IndexRange& range) {
    pieces_.push_back({&diff, &a, &b, range, size_a_, size_b_});
    size_a_ += static_cast<size_t>(range.size()) * width_of(a);
    size_b_ += static_cast<size_t>(range.size()) * width_of(b);
  }

  /// Returns the bytes of A that were compared.
  size_t compare() {
    bytes_a_.resize(size_a_);
    bytes_b_.resize(size_b_);
    std::vector<BoxRead> reads_a, reads_b;
    for (const auto& piece : pieces_) {
      add_reads(
          reads_a, *piece.a, piece.range, bytes_a_.data() + piece.begin_a);
      add_reads(
          reads_b, *piece.b, piece.range, bytes_b_.data() + piece.begin_b);
    }
    a_.read(reads_a);
    b_.read(reads_b);
    for (const auto& piece : pieces_) {
      const auto* from_a = bytes_a_.data() + piece.begin_a;
      const auto* from_b = bytes_b_.data() + piece.begin_b;
      piece.diff->numbers ? compare_numbers(piece, from_a, from_b)
                          : compare_bits(piece, from_a, from_b);
    }
    pieces_.clear();
    size_b_ = 0;
    return std::exchange(size_a_, 0);
  }

 private:
  CheckpointReader& a_;
  CheckpointReader& b_;
  size_t bytes_;
  std::vector<Piece> pieces_;
  size_t size_a_ = 0, size_b_ = 0;
  std::vector<std::byte> bytes_a_, bytes_b_;
};

TensorDiff of_one(const SavedTensor& tensor, Change change) {
  TensorDiff diff{.name = tensor.name, .kind = tensor.kind, .change = change};
  (change == Change::added ? diff.dtype_b : diff.dtype_a) = tensor.dtype;
  (change == Change::added ? diff.shape_b : diff.shape_a) = tensor.shape;
  return diff;
}

TensorDiff of_two(const SavedTensor& a, const SavedTensor& b) {
  auto diff = of_one(a, Change::none);
  diff.dtype_b = b.dtype;
  diff.shape_b = b.shape;
  if (a.shape != b.shape) {
    diff.change = Change::shape;
  } else if (a.dtype != b.dtype) {
    diff.change = Change::dtype;
  } else if (a.hash != b.hash) {
    diff.change = Change::values;
  }
  return diff;
}

using Index = std::unordered_map<std::string_view, const SavedTensor*>;

Index index_of(const CheckpointManifest& manifest) {
  Index index;
  for (const auto& tensor : manifest.tensors) index[tensor.name] = &tensor;
  return index;
}

bool comparable(const TensorDiff& diff) {
  return diff.change == Change::values ||
         (diff.change == Change::dtype && is_float_dtype(diff.dtype_a) &&
          is_float_dtype(diff.dtype_b));
}

}  // namespace

std::string to_string(Change change) {
  static constexpr std::array kNames = {"none",  "values",  "dtype",
                                        "shape", "missing", "added"};
  return kNames.at(static_cast<size_t>(change));
}

double TensorDiff::relative() const {
  if (change_norm == 0) return 0;
  return norm == 0 ? std::numeric_limits<double>::infinity()
                   : change_norm / norm;
}

std::vector<TensorDiff> diff_checkpoints(
    CheckpointReader& a, CheckpointReader& b,
    const std::function<bool(const SavedTensor&)>& wanted,
    const std::function<void(int64_t)>& progress, size_t batch_bytes) {
  const auto& tensors_a = a.manifest().tensors;
  const auto& tensors_b = b.manifest().tensors;
  const auto names_a = index_of(a.manifest());
  const auto names_b = index_of(b.manifest());
  std::vector<TensorDiff> diffs;
  diffs.reserve(tensors_a.size() + tensors_b.size());  // pieces point to them
  Batch batch(a, b, std::max(batch_bytes, sizeof(double)));
  int64_t done = 0;
  const auto compare = [&] {
    done += static_cast<int64_t>(batch.compare());
    if (progress) progress(done);
  };
  for (const auto& in_a : tensors_a) {
    const auto found = names_b.find(in_a.name);
    if (found == names_b.end()) {
      diffs.push_back(of_one(in_a, Change::missing));
      continue;
    }
    const auto* in_b = found->second;
    auto& diff = diffs.emplace_back(of_two(in_a, *in_b));
    if (!comparable(diff) || (wanted && !wanted(in_a))) continue;
    diff.numbers = is_float_dtype(diff.dtype_a);
    const size_t width = std::max(width_of(in_a), width_of(*in_b));
    const int64_t numel = whole_box(in_a.shape).numel();
    for (int64_t begin = 0; begin < numel;) {
      if (batch.room() < width) compare();
      const auto room = static_cast<int64_t>(batch.room() / width);
      const int64_t end = begin + std::min(room, numel - begin);
      batch.add(diff, in_a, *in_b, {begin, end});
      begin = end;
    }
  }
  if (!batch.empty()) compare();
  for (const auto& in_b : tensors_b) {
    if (!names_a.contains(in_b.name)) {
      diffs.push_back(of_one(in_b, Change::added));
    }
  }
  return diffs;
}

}  // namespace echelon
