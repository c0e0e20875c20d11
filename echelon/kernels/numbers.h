// The dtypes that our kernels are compiled for (numbers.cu).
#pragma once

#include <torch/types.h>

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

}  // namespace echelon::kernels
