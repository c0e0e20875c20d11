// The door to CUDA and NCCL. Both live in a shared library of their own,
// libechelon_nccl.so, which is loaded when one of the functions that need it is
// first called: a program on a machine without a GPU never touches them.
//
// The library is looked for where the loader looks for any other: the RPATH of
// the program (build/lib, or lib/ of an installed package), LD_LIBRARY_PATH.
#pragma once

namespace echelon {

/// GPUs that this process may use, as the driver counts them (so
/// CUDA_VISIBLE_DEVICES counts); 0 without a driver. Never throws, and loads
/// nothing but the driver.
int cuda_device_count() noexcept;

/// Loads the library, and with it LibTorch's CUDA kernels: CUDA tensors exist
/// from here on. The functions below call it. Throws ConfigError when it cannot
/// be loaded; the message has the loader's reason.
void load_cuda();

/// Makes cuda:<device_index> the calling thread's current device.
void set_cuda_device(int device_index);
/// Returns when all work of the calling thread's current stream is done.
void synchronize_cuda_stream();

}  // namespace echelon
