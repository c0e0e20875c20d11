// Access to CUDA and NCCL. Both are linked into a shared library of their own,
// libechelon_nccl.so, which the first call of a function that needs it loads: a
// program on a machine without a GPU never touches them.
//
// The loader looks for the library as for any other: in the RPATH of the
// program (build/lib, or lib/ of an installed package) and in LD_LIBRARY_PATH.
#pragma once

namespace echelon {

/// The number of GPUs that this process may use, by the driver's count (which
/// respects CUDA_VISIBLE_DEVICES); 0 without a driver. Never throws, and loads
/// nothing but the driver.
int cuda_device_count() noexcept;

/// Loads the library, and with it LibTorch's CUDA kernels: CUDA tensors can be
/// made afterwards. The functions below call it. Throws ConfigError with the
/// loader's reason when the library cannot be loaded.
void load_cuda();

/// Makes cuda:<device_index> the calling thread's current device.
void set_cuda_device(int device_index);
/// Returns when all work of the calling thread's current stream is done.
void synchronize_cuda_stream();

}  // namespace echelon
