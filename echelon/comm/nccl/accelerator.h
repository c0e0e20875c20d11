// Access to the accelerator and its communicators, CUDA and NCCL. Both are
// linked into a shared library of their own, libechelon_nccl.so, which the
// first call of a function that needs it loads: a program on a machine without
// a GPU never touches them. The device of our own tests has a library of the
// same interface, libechelon_test_device.so.
//
// The loader looks for the library as for any other: in the RPATH of the
// program (build/lib, or lib/ of an installed package) and in LD_LIBRARY_PATH.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "echelon/options/comm.h"

namespace echelon {

namespace nccl {
class Graph;
}

/// The number of GPUs that this process can use, by the driver's count (which
/// respects CUDA_VISIBLE_DEVICES); 0 without a driver, or with one that cannot
/// be used. Never throws, and loads nothing but the driver.
int cuda_device_count() noexcept;

/// Loads the library of `kind` (cuda or test), and with it LibTorch's kernels
/// for it: tensors of the returned type can be made afterwards. The functions
/// below call it. Throws ConfigError with the loader's reason when the library
/// cannot be loaded.
c10::DeviceType load_accelerator(DeviceKind kind);

/// How many devices of `kind` there are. Loads its library.
int accelerator_count(DeviceKind kind);

/// Makes `device` the calling thread's current one.
void set_current_device(c10::Device device);
/// Returns when all work of the calling thread's current stream on its current
/// device, which is of type `type`, is done.
void synchronize_current_stream(c10::DeviceType type);

/// Loads the kernels of `source`, CUDA C++, for the calling thread's current
/// GPU; later calls find them. The code comes from the user's cache folder, or
/// else is compiled for the GPU, which takes seconds, and kept there.
/// Returns why there can be no such kernels here, and on a last line the way
/// out; empty when they are ready. Throws for other errors, running out of
/// memory among them.
///
///   source  needs no header and outlives the process's launches
std::string prepare_kernels(std::string_view source);

/// Queues a kernel of CUDA C++ on the calling thread's current stream of its
/// current GPU. `name` is an extern "C" function of `source`, which
/// prepare_kernels() has loaded there.
///
///   arguments  a pointer to each argument of the function
///
/// Throws c10::Error with the driver's reason.
void launch_kernel(
    std::string_view source, const std::string& name, int64_t blocks,
    int threads, void** arguments);

/// Work that a device is given once and repeats by one call: a CUDA graph. One
/// at a time is captured on a device.
///
///   DeviceGraph graph(device);
///   graph.begin();
///   … work on the current stream …
///   graph.end();      // the device has done nothing yet
///   graph.replay();   // any number of times
///
/// A replay does what was captured with the same memory, so what the work reads
/// must stay where it is. Memory that is allocated while it is captured is the
/// graph's: a tensor that still has some has the values of the last replay.
class DeviceGraph {
 public:
  explicit DeviceGraph(c10::Device device);
  /// Ends a capture that an exception left open.
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  /// Captures what the current stream of the device is given from here, by any
  /// thread, and what other streams are given after they waited for it. The
  /// stream must not be the device's default one. Meanwhile the host may not
  /// wait for the device.
  ///
  ///   before  a graph whose memory this one shares: each replay of this one
  ///           follows one of it; null: none
  void begin(const DeviceGraph* before = nullptr);
  /// Throws c10::Error when streams are left that the current one does not wait
  /// for.
  void end();
  /// Queues the work on the current stream.
  void replay();

 private:
  const c10::Device device_;
  std::unique_ptr<nccl::Graph> graph_;
  bool capturing_ = false;
};

/// Whether a DeviceGraph captures what `device` is given.
bool is_capturing(c10::Device device) noexcept;

}  // namespace echelon
