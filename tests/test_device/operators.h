// What operators and collectives of the test device share.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>

#include "tests/test_device/sanitizer.h"

namespace echelon::test_device {

/// Makes a device the calling thread's current one while it lives.
class ExchangeDevice {
 public:
  explicit ExchangeDevice(int device);
  ~ExchangeDevice();
  ExchangeDevice(const ExchangeDevice&) = delete;
  ExchangeDevice& operator=(const ExchangeDevice&) = delete;

 private:
  const int before_;
};

/// The CPU tensor over the memory of a tensor of the device, or of pinned
/// memory, for kernels. It does not keep the memory.
at::Tensor kernel_view(const at::Tensor& tensor);

/// The range from the first to the last element of a tensor.
Access access_of(const at::Tensor& tensor, bool write);

bool is_ours(const at::Tensor& tensor);
/// "Float [2, 3]".
std::string text_of(const at::Tensor& tensor);

/// Registers what is not run through the CPU's kernels.
void register_kernels(torch::Library& library);

void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace echelon::test_device
