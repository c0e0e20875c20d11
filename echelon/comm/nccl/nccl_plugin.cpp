// Compiled into libechelon_nccl.so alone. This file and kernel_launcher.cpp are
// the only ones that include CUDA's and NCCL's headers, and the only objects
// that link LibTorch's CUDA libraries.
#include "echelon/comm/nccl/nccl_plugin.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "echelon/comm/nccl/kernel_launcher.h"

namespace echelon::nccl {
namespace {

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int device_index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device_index));
}

void synchronize_current_stream() {
  c10::cuda::getCurrentCUDAStream().synchronize();
}

c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, int device_index, int most_blocks) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  // A collective has few blocks, which other ranks wait for. The GPU starts
  // them before those of products that were queued earlier.
  options->is_high_priority_stream = true;
  if (most_blocks > 0) options->config.maxCTAs = most_blocks;
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  // Without it barrier() guesses the device from the rank.
  backend->setBoundDeviceId(
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_index)));
  return backend;
}

// Other threads may wait for the device or take memory while a step is captured
// (the loader, the watchdog of NCCL): only this thread's mistakes end a
// capture.
class CudaGraph final : public Graph {
 public:
  void begin(const Graph* before) override {
    const auto pool = before == nullptr
                          ? at::cuda::graph_pool_handle()
                          : static_cast<const CudaGraph*>(before)->pool_;
    graph_.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    pool_ = pool;
  }
  void end() override { graph_.capture_end(); }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
  at::cuda::MempoolId_t pool_{0, 0};
};

std::unique_ptr<Graph> make_graph() {
  return std::make_unique<CudaGraph>();
}

constexpr Plugin kPlugin{
    Plugin::kVersion,
    c10::DeviceType::CUDA,
    device_count,
    set_device,
    synchronize_current_stream,
    make_backend,
    prepare_kernels,
    launch_kernel,
    make_graph};

}  // namespace
}  // namespace echelon::nccl

extern "C" __attribute__((visibility("default"))) const echelon::nccl::Plugin*
echelon_nccl_plugin() {
  return &echelon::nccl::kPlugin;
}
