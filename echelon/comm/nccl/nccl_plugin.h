// The interface of libechelon_nccl.so, and of the tests' device: the library's
// one C function, echelon_nccl_plugin(), returns this table of functions.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace echelon::nccl {

/// What DeviceGraph (accelerator.h) is made of.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void begin(const Graph* before) = 0;
  virtual void end() = 0;
  virtual void replay() = 0;
};

struct Plugin {
  /// Changed with the table: a library of another version is refused.
  static constexpr int kVersion = 5;

  int version;
  c10::DeviceType device_type;
  int (*device_count)();
  void (*set_device)(int device_index);
  void (*synchronize_current_stream)();
  c10::intrusive_ptr<c10d::Backend> (*make_backend)(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      std::chrono::milliseconds timeout, int device_index, int most_blocks);
  std::string (*prepare_kernels)(std::string_view source);
  void (*launch_kernel)(
      std::string_view source, const std::string& name, int64_t blocks,
      int threads, void** arguments);
  std::unique_ptr<Graph> (*make_graph)();
};

}  // namespace echelon::nccl
