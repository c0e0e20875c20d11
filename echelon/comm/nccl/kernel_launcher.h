// Kernels of CUDA C++ that are compiled at run time; a part of
// libechelon_nccl.so.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace echelon::nccl {

/// echelon::prepare_kernels (accelerator.h), behind the table of functions.
std::string prepare_kernels(std::string_view source);

/// echelon::launch_kernel (accelerator.h), behind the table of functions.
void launch_kernel(
    std::string_view source, const std::string& name, int64_t blocks,
    int threads, void** arguments);

}  // namespace echelon::nccl
