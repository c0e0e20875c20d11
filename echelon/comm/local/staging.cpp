#include "echelon/comm/local/staging.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <numeric>

namespace echelon::local {

Staged stage(const at::Tensor& tensor, Use use) {
  if (tensor.is_cpu() && tensor.is_contiguous()) {
    return {tensor, tensor, false};
  }
  const auto options = tensor.options()
                           .device(at::kCPU)
                           .memory_format(at::MemoryFormat::Contiguous)
                           .pinned_memory(tensor.is_cuda());
  Staged staged{tensor, at::empty(tensor.sizes(), options), use != Use::input};
  if (use != Use::output) {
    staged.host.copy_(tensor);
  }
  return staged;
}

std::optional<c10::Stream> current_stream(const std::vector<Staged>& staged) {
  for (const auto& s : staged) {
    if (!s.tensor.is_cpu()) {
      const auto device = s.tensor.device();
      return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    }
  }
  return std::nullopt;
}

void copy_back(
    const std::vector<Staged>& staged,
    const std::optional<c10::Stream>& stream) {
  std::optional<c10::StreamGuard> guard;
  if (stream) {
    guard.emplace(*stream);
  }
  for (const auto& s : staged) {
    if (s.copy_back) {
      s.tensor.copy_(s.host);
    }
  }
}

at::Tensor flatten(const Tensors& tensors) {
  Tensors views;
  for (const auto& t : tensors) {
    views.push_back(t.reshape({-1}));
  }
  return at::cat(views);
}

void unflatten(const at::Tensor& flat, const Tensors& tensors) {
  int64_t at = 0;
  for (const auto& t : tensors) {
    t.copy_(flat.narrow(0, at, t.numel()).view(t.sizes()));
    at += t.numel();
  }
}

std::vector<Piece> slices(
    const char* what, const at::Tensor& tensor,
    const std::vector<int64_t>& splits, char* data, int size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> counts = splits;
  if (counts.empty()) {
    if (rows % size != 0) {
      refuse(
          "all_to_all",
          "{} {}: dim 0 must divide by {} ranks, or give "
          "the splits",
          what, text(tensor), size);
    }
    counts.assign(size, rows / size);
  }
  const int64_t sum = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (static_cast<int>(counts.size()) != size || sum != rows ||
      *std::min_element(counts.begin(), counts.end()) < 0) {
    refuse(
        "all_to_all",
        "{} splits [{}] of {}: there must be one per rank, not negative, and "
        "their sum {}",
        what, c10::str(c10::Join(", ", counts)), text(tensor), rows);
  }
  std::vector<Piece> pieces;
  for (const int64_t count : counts) {
    pieces.push_back({data, static_cast<uint64_t>(count * row)});
    data += count * row * tensor.element_size();
  }
  return pieces;
}

Dtype dtype_of(const char* operation, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Dtype::float32;
    case at::kDouble:
      return Dtype::float64;
    case at::kBFloat16:
      return Dtype::bfloat16;
    case at::kHalf:
      return Dtype::float16;
    case at::kChar:
      return Dtype::int8;
    case at::kByte:
      return Dtype::uint8;
    case at::kShort:
      return Dtype::int16;
    case at::kInt:
      return Dtype::int32;
    case at::kLong:
      return Dtype::int64;
    case at::kBool:
      return Dtype::boolean;
    default:
      refuse(
          operation,
          "a tensor of {}; float32, float64, bfloat16, "
          "float16, int8, uint8, int16, int32, int64 and bool "
          "are possible",
          c10::toString(tensor.scalar_type()));
  }
}

Shape shape_of(const char* operation, const at::Tensor& tensor) {
  Shape shape;
  shape.dtype = dtype_of(operation, tensor);
  shape.count = static_cast<uint64_t>(tensor.numel());
  shape.num_dims =
      tensor.dim() <= kMaxDims ? static_cast<int>(tensor.dim()) : kMaxDims + 1;
  for (int i = 0; i < shape.num_dims && i < kMaxDims; ++i) {
    shape.dims[i] = tensor.size(i);
  }
  return shape;
}

Reduction reduction_of(
    const char* operation, const c10d::ReduceOp& op, const at::Tensor& tensor) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return Reduction::sum;
    case c10d::ReduceOp::MIN:
      return Reduction::min;
    case c10d::ReduceOp::MAX:
      return Reduction::max;
    case c10d::ReduceOp::AVG:
      if (tensor.scalar_type() == at::kBool) {
        refuse(operation, "no average of bool; use sum, min or max");
      }
      return Reduction::avg;
    default:
      refuse(
          operation, "this reduction is not there; use sum, avg, min or max");
  }
}

std::string text(const at::Tensor& tensor) {
  return c10::str(
      tensor.scalar_type() == at::kBool ? "bool"
                                        : c10::toString(tensor.scalar_type()),
      " ", tensor.sizes());
}

at::Tensor& only(const char* operation, Tensors& tensors) {
  if (tensors.size() != 1) {
    refuse(operation, "one tensor per rank, not {}", tensors.size());
  }
  return tensors[0];
}

void check_equal(
    const char* operation, const at::Tensor& tensor, const at::Tensor& model) {
  if (tensor.numel() != model.numel() ||
      tensor.scalar_type() != model.scalar_type()) {
    refuse(
        operation, "tensors must be alike, but there are {} and {}",
        text(model), text(tensor));
  }
}

void check_list(const char* operation, const Tensors& list, int size) {
  if (static_cast<int>(list.size()) != size) {
    refuse(operation, "{} tensors for {} ranks", list.size(), size);
  }
}

void check_coalesced(const char* operation, const Tensors& tensors) {
  if (tensors.empty()) {
    refuse(operation, "an empty list of tensors");
  }
  for (const auto& t : tensors) {
    if (t.scalar_type() != tensors[0].scalar_type() ||
        t.device() != tensors[0].device()) {
      refuse(
          operation,
          "one dtype and one device for all tensors, but there "
          "are {} and {}",
          text(tensors[0]), text(t));
    }
  }
}

}  // namespace echelon::local
