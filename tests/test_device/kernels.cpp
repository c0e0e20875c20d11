// Kernels of the test device that are written by hand: memory, copies between
// the host and the device, and operators that LibTorch's fallbacks would run in
// another way than CUDA does.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "echelon/text/format.h"
#include "tests/test_device/memory.h"
#include "tests/test_device/operators.h"
#include "tests/test_device/runtime.h"

namespace echelon::test_device {

using at::Tensor;

bool is_ours(const Tensor& tensor) {
  return tensor.defined() &&
         tensor.device().type() == c10::DeviceType::PrivateUse1;
}

std::string text_of(const Tensor& tensor) {
  return format(
      "{} {}", c10::toString(tensor.scalar_type()), c10::str(tensor.sizes()));
}

ExchangeDevice::ExchangeDevice(int device) : before_(current_device()) {
  set_current_device(device);
}
ExchangeDevice::~ExchangeDevice() {
  set_current_device(before_);
}

at::Tensor kernel_view(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_ours(tensor)) {
    if (tensor.defined() && tensor.is_cpu() && tensor.numel() > 0 &&
        is_pinned(tensor.storage().data())) {
      return at::from_blob(
          kernel_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
          tensor.options());
    }
    return tensor;
  }
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(
      kernel_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
      options);
}

namespace {

/// The bytes from the first element to the last, which is there.
size_t extent_bytes(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

}  // namespace

Access access_of(const at::Tensor& tensor, bool write) {
  if (!is_ours(tensor) || tensor.numel() == 0) return {.write = write};
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {begin, begin + extent_bytes(tensor), write, text_of(tensor)};
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const int index = storage.device().index();
  const ExchangeDevice guard(index);
  auto* const impl = storage.unsafeGetStorageImpl();
  c10::DataPtr data = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) {
    const auto begin = [](const c10::DataPtr& one) {
      return reinterpret_cast<uintptr_t>(one.get());
    };
    const uintptr_t from = begin(impl->data_ptr());
    const uintptr_t to = begin(data);
    Launch launch{
        .name = "resize_",
        .accesses = {
            {from, from + kept, false, "storage"},
            {to, to + kept, true, "storage"}}};
    device_of(index).launch(
        current_stream(index), std::move(launch),
        [a = kernel_address(impl->data_ptr().get()),
         b = kernel_address(data.get()), kept] { std::memcpy(b, a, kept); });
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

namespace {

// ------------------------------------------------------------------ factories

int device_index(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const ExchangeDevice guard(device_index(device));
  return at::detail::empty_generic(
      size, device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const ExchangeDevice guard(device_index(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// --------------------------------------------------------------------- copies

void check_no_mark(const Tensor& tensor) {
  TORCH_CHECK(
      !tensor.is_conj() && !tensor.is_neg(),
      "test device: tensors that are conjugated or negated in place");
}

/// A copy within the device, to it or from it. The host's side is dense memory:
/// pinned, or staged.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  check_no_mark(from);
  if (to.numel() == 0) return to;
  const Tensor source =
      from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  const bool from_device = is_ours(source);
  const bool to_device = is_ours(to);
  const int index = (to_device ? to : source).device().index();
  Device& device = device_of(index);
  const int stream = current_stream(index);
  const auto bytes = static_cast<int64_t>(to.nbytes());
  Launch launch{.name = "copy_"};
  if (from_device) launch.accesses.push_back(access_of(source, false));
  if (to_device) launch.accesses.push_back(access_of(to, true));
  const auto host_use = [](const Tensor& tensor, bool writes) {
    return HostUse{
        reinterpret_cast<uintptr_t>(tensor.data_ptr()), extent_bytes(tensor),
        writes};
  };

  if (from_device && to_device) {
    const int other = source.device().index();
    if (other != index) {
      device.refuse_in_capture(stream, "copy between devices");
      // Between devices: both streams take part.
      const auto mark = device_of(other).mark(current_stream(other));
      mark->wait();
    }
    device.launch(
        stream, std::move(launch),
        [a = kernel_view(source), b = kernel_view(to)] { b.copy_(a); });
    if (other != index) device.mark(stream)->wait();
    return to;
  }
  if (to_device) {
    {
      std::lock_guard lock(device.mutex());
      device.counts.copied_to_device_bytes += bytes;
    }
    launch.name = "copy to the device";
    const bool pinned = is_pinned(source.storage().data());
    if (pinned) launch.host_uses.push_back(host_use(source, false));
    device.refuse_in_capture(stream, "copy from memory of the host");
    // Pageable memory is staged before the call returns.
    const Tensor host = pinned ? kernel_view(source) : source.clone();
    device.launch(stream, std::move(launch), [host, b = kernel_view(to)] {
      b.copy_(host);
    });
    if (!non_blocking) {
      device.wait(device.mark(stream), "copy to the device");
    } else if (!pinned && source.dim() > 0) {
      device.count_wait("copy from pageable memory");  // CUDA stages it
    }
    return to;
  }
  {
    std::lock_guard lock(device.mutex());
    device.counts.copied_to_host_bytes += bytes;
  }
  device.refuse_in_capture(stream, "copy to memory of the host");
  launch.name = "copy to the host";
  const bool asynchronous = non_blocking && is_pinned(to.storage().data());
  if (asynchronous) launch.host_uses.push_back(host_use(to, true));
  device.launch(
      stream, std::move(launch),
      [a = kernel_view(source), b = kernel_view(to)] { b.copy_(a); });
  if (!asynchronous) device.wait(device.mark(stream), "copy to the host");
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  Device& device = device_of(tensor.device().index());
  const int stream = current_stream(device.index());
  device.refuse_in_capture(stream, "item");
  Launch launch{.name = "item", .accesses = {access_of(tensor, false)}};
  at::Scalar value;
  device.launch(stream, std::move(launch), [&value, a = kernel_view(tensor)] {
    value = a.item();
  });
  device.wait(device.mark(stream), "item");
  return value;
}

// ---------------------------------------------------------- storage and views

const Tensor& resize(
    const Tensor& self, at::IntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  const size_t wanted = at::detail::computeStorageNbytesContiguous(
      size, self.element_size(), static_cast<size_t>(self.storage_offset()));
  if (wanted > self.storage().nbytes()) {
    resize_storage(self.storage(), wanted);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous &&
      *format != at::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

void record_stream_of(Tensor& self, at::Stream stream) {
  record_stream(self.storage().data_ptr(), static_cast<int>(stream.id()));
}

// Parameters of a module move between the CPU and the device in place.
bool same_kind(const Tensor& self, const Tensor& from) {
  const auto dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided &&
           (tensor.is_cpu() || is_ours(tensor));
  };
  return dense(self) && dense(from);
}

// Takes the fused kernel, as CUDA would.
Tensor attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  const bool fused = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
                     query.size(3) == value.size(3) && dropout == 0 &&
                     !(mask && mask->defined() && mask->requires_grad());
  if (!fused) {
    return std::get<0>(at::_scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, std::nullopt, scale,
        grouped));
  }
  const auto repeat = [&](const Tensor& x) {
    return x.size(1) == query.size(1)
               ? x
               : x.repeat_interleave(query.size(1) / x.size(1), 1);
  };
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
      query, repeat(key), repeat(value), dropout, causal, mask, scale));
}

}  // namespace

void register_kernels(torch::Library& library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("view", &at::native::view);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("record_stream", &record_stream_of);
  library.impl("_has_compatible_shallow_copy_type", &same_kind);
}

at::Tensor attention_of_device(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  return attention(query, key, value, mask, dropout, causal, scale, grouped);
}

}  // namespace echelon::test_device

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl(
      "scaled_dot_product_attention",
      &echelon::test_device::attention_of_device);
}
