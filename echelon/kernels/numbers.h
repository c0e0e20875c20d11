// The dtypes that our kernels are compiled for, and their accesses
// (numbers.cu).
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

namespace echelon::kernels {

inline bool is_kernel_number(torch::Dtype dtype) {
  return dtype == torch::kFloat32 || dtype == torch::kBFloat16 ||
         dtype == torch::kHalf;
}

/// What a kernel's name ends with for a dtype of is_kernel_number().
inline std::string number_suffix(torch::Dtype dtype) {
  return dtype == torch::kFloat32    ? "_float"
         : dtype == torch::kBFloat16 ? "_bfloat16"
                                     : "_half";
}

/// Elements of x in an access of 16 bytes.
inline int64_t packet_of(const torch::Tensor& x) {
  return 16 / static_cast<int64_t>(x.element_size());
}

inline bool begins_a_packet(const torch::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

}  // namespace echelon::kernels
