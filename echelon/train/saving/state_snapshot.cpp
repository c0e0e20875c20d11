// Host copies of a rank's state, in one allocation.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstring>
#include <unordered_set>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/train/saving/saved_state.h"

namespace echelon {
namespace {

using torch::Tensor;

// Alignment of each slice: that of any element, and of a cache line.
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

bool is_row_major(const PlacedBox& placed) {
  int64_t stride = 1;
  for (size_t d = placed.box.sizes.size(); d-- > 0;) {
    if (placed.box.sizes[d] != 1 && placed.strides[d] != stride) return false;
    stride *= placed.box.sizes[d];
  }
  return true;
}

// The box's elements in `tensor`, which is contiguous.
Tensor view_of(const Tensor& tensor, const PlacedBox& placed) {
  return tensor.as_strided(
      placed.box.sizes, placed.strides, tensor.storage_offset() + placed.begin);
}

int64_t bytes_of(const StateShard& part, const PlacedBox& placed) {
  return placed.box.numel() * static_cast<int64_t>(part.tensor.element_size());
}

Tensor host_memory(int64_t bytes, bool pinned) {
  try {
    return torch::empty(
        {bytes}, torch::dtype(torch::kUInt8).pinned_memory(pinned));
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw Error(format(
        "[checkpoint] a copy of this rank's state takes {} bytes of the host's "
        "memory, which are not there ({}); with more ranks each has less to "
        "write",
        bytes, text.substr(0, text.find('\n'))));
  }
}

void copy_out(const Tensor& from, const PlacedBox& placed, std::byte* to) {
  const auto width = static_cast<int64_t>(from.element_size());
  const int64_t bytes = placed.box.numel() * width;
  // LibTorch copies with several threads, which pays for large ones.
  constexpr int64_t kSmallBytes = 256 << 10;
  if (from.is_cpu() && bytes <= kSmallBytes && is_row_major(placed)) {
    const auto* source = static_cast<const std::byte*>(from.const_data_ptr());
    std::memcpy(to, source + placed.begin * width, static_cast<size_t>(bytes));
    return;
  }
  torch::from_blob(to, placed.box.sizes, torch::dtype(from.scalar_type()))
      .copy_(view_of(from, placed), /*non_blocking=*/true);
}

}  // namespace

void StateSnapshot::take(const std::vector<StateShard>& parts) {
  fill(parts, HostMemory::copied);
}

void StateSnapshot::begin(const std::vector<StateShard>& parts) {
  fill(parts, HostMemory::copied_later);
}

void StateSnapshot::refer_to(const std::vector<StateShard>& parts) {
  fill(parts, HostMemory::referred_to);
}

void StateSnapshot::refer_until_update(const std::vector<StateShard>& parts) {
  fill(parts, HostMemory::referred_until_update);
}

void StateSnapshot::finish() {
  for (const auto& one : later_) std::memcpy(one.to, one.from, one.bytes);
  later_.clear();
}

// Each box is referred to where it is, copied now, or noted to be copied by
// finish(). A first pass adds up the memory, so there is one allocation; copies
// from devices run asynchronously until the end.
void StateSnapshot::fill(const std::vector<StateShard>& parts, HostMemory how) {
  const torch::NoGradGuard no_grad;
  const auto lies_ready = [](const StateShard& part, const PlacedBox& placed) {
    return part.tensor.is_cpu() && part.tensor.is_contiguous() &&
           is_row_major(placed);
  };
  const auto by_update = [](const StateShard& part) {
    return part.kind == SavedKind::parameter ||
           part.kind == SavedKind::optimizer;
  };
  const auto stays = [&](const StateShard& part, const PlacedBox& placed) {
    const bool referred =
        how == HostMemory::referred_to ||
        (how == HostMemory::referred_until_update && by_update(part));
    return referred && lies_ready(part, placed);
  };
  const auto waits = [&](const StateShard& part, const PlacedBox& placed) {
    return how == HostMemory::copied_later && by_update(part) &&
           lies_ready(part, placed);
  };
  int64_t needed = 0;
  bytes_ = 0;
  std::unordered_set<torch::Device> devices;
  for (const auto& part : parts) {
    if (!part.tensor.is_cpu()) devices.insert(part.tensor.device());
    for (const auto& placed : part.boxes) {
      bytes_ += bytes_of(part, placed);
      if (stays(part, placed)) continue;
      needed += round_up(bytes_of(part, placed), kAlignment);
    }
  }
  slices_.clear();
  live_.clear();
  later_.clear();
  if (!memory_.defined() || memory_.numel() < needed) {
    memory_.reset();
    memory_ = host_memory(needed, !devices.empty());
  }
  auto* to = static_cast<std::byte*>(memory_.mutable_data_ptr());
  for (const auto& part : parts) {
    const Tensor from = part.tensor.contiguous();
    const std::string dtype = dtype_to_safetensors(from.scalar_type());
    const auto* values =
        from.is_cpu() ? static_cast<const std::byte*>(from.const_data_ptr())
                      : nullptr;
    for (const auto& placed : part.boxes) {
      const int64_t bytes = bytes_of(part, placed);
      const int64_t begin =
          placed.begin * static_cast<int64_t>(from.element_size());
      const std::byte* at = to;
      if (stays(part, placed)) {
        at = values + begin;
        live_.push_back(from);
      } else {
        if (waits(part, placed)) {
          later_.push_back({values + begin, to, static_cast<size_t>(bytes)});
          live_.push_back(from);
        } else {
          copy_out(from, placed, to);
        }
        to += round_up(bytes, kAlignment);
      }
      slices_.push_back(
          {.name = part.name,
           .kind = part.kind,
           .dtype = dtype,
           .shape = part.shape,
           .box = placed.box,
           .bytes = {at, static_cast<size_t>(bytes)}});
    }
  }
  for (const auto& device : devices) {
    c10::impl::VirtualGuardImpl(device.type())
        .synchronizeDevice(device.index());
  }
}

}  // namespace echelon
