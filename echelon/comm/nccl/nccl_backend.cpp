#include "echelon/comm/nccl/nccl_backend.h"

#include <dlfcn.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>

#include "echelon/comm/nccl/choose_gpu.h"
#include "echelon/comm/nccl/nccl_plugin.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

[[noreturn]] void
refuse(const std::string& reason, const std::string& way_out) {
  throw ConfigError(format("backend nccl: {}; {}", reason, way_out));
}

/// Loads `library` and returns its table; `way_out` is for a machine that lacks
/// what the library needs.
const nccl::Plugin& open_plugin(const char* library, const char* way_out) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* reason = dlerror();
    refuse(
        format(
            "cannot load {} ({})", library,
            reason != nullptr ? reason : "no reason given"),
        way_out);
  }
  using Entry = const nccl::Plugin* (*)();
  const auto entry =
      reinterpret_cast<Entry>(dlsym(opened, "echelon_nccl_plugin"));
  if (entry == nullptr || entry()->version != nccl::Plugin::kVersion) {
    refuse(
        format("{} belongs to another build of Echelon", library),
        "install the library and the program of one build");
  }
  return *entry();
}

const nccl::Plugin& open_cuda() {
  const RankGpus here = gpus_of_process(0, 0, 0);
  if (!here.problem.empty()) {
    refuse(here.problem, "or use backend \"local\" or \"gloo\"");
  }
  if (here.gpus.empty()) {
    refuse(
        "the CUDA driver reports no GPU on this machine",
        "use backend \"local\" on one host or \"gloo\" on several");
  }
  return open_plugin(
      "libechelon_nccl.so",
      "LibTorch needs all the CUDA wheels it asks for: install them with "
      "\"pip install torch==" TORCH_VERSION
      "\" and point ECHELON_LIBTORCH at its "
      "torch/ folder, or use backend \"local\" or \"gloo\"");
}

// Where the initialisation of a static throws, the next call tries it again.
const nccl::Plugin& plugin(DeviceKind kind) {
  if (kind == DeviceKind::test) {
    static const nccl::Plugin& test =
        open_plugin("libechelon_test_device.so", "build Echelon's tests");
    return test;
  }
  static const nccl::Plugin& cuda = open_cuda();
  return cuda;
}

const nccl::Plugin& plugin(c10::DeviceType type) {
  return plugin(
      type == c10::DeviceType::CUDA ? DeviceKind::cuda : DeviceKind::test);
}

void check_device(c10::Device device) {
  const int count = plugin(device.type()).device_count();
  if (device.index() < 0 || device.index() >= count) {
    refuse(
        format("{} does not exist: {} GPU(s) are visible", device.str(), count),
        "start at most one rank per GPU, or use backend \"local\", whose ranks "
        "share one");
  }
}

// By the device's index. A process has devices of one type.
std::array<std::atomic<bool>, 128> captured{};

}  // namespace

DeviceGraph::DeviceGraph(c10::Device device)
    : device_(device), graph_(plugin(device.type()).make_graph()) {}

DeviceGraph::~DeviceGraph() {
  if (!capturing_) return;
  try {
    end();
  } catch (const std::exception&) {
    // The error that left the capture open is the one to be told.
  }
}

void DeviceGraph::begin(const DeviceGraph* before) {
  graph_->begin(before == nullptr ? nullptr : before->graph_.get());
  capturing_ = true;
  captured.at(static_cast<size_t>(device_.index())) = true;
}

void DeviceGraph::end() {
  capturing_ = false;
  captured.at(static_cast<size_t>(device_.index())) = false;
  graph_->end();
}

void DeviceGraph::replay() {
  graph_->replay();
}

bool is_capturing(c10::Device device) noexcept {
  if (device.is_cpu() || !device.has_index()) return false;
  return captured.at(static_cast<size_t>(device.index()));
}

int cuda_device_count() noexcept {
  return static_cast<int>(gpus_of_process(0, 0, 0).gpus.size());
}

c10::DeviceType load_accelerator(DeviceKind kind) {
  return plugin(kind).device_type;
}

int accelerator_count(DeviceKind kind) {
  return plugin(kind).device_count();
}

void set_current_device(c10::Device device) {
  check_device(device);
  plugin(device.type()).set_device(device.index());
}

void synchronize_current_stream(c10::DeviceType type) {
  plugin(type).synchronize_current_stream();
}

std::string prepare_kernels(std::string_view source) {
  return plugin(DeviceKind::cuda).prepare_kernels(source);
}

void launch_kernel(
    std::string_view source, const std::string& name, int64_t blocks,
    int threads, void** arguments) {
  plugin(DeviceKind::cuda)
      .launch_kernel(source, name, blocks, threads, arguments);
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, c10::Device device, int most_blocks) {
  check_device(device);
  return plugin(device.type())
      .make_backend(store, rank, size, timeout, device.index(), most_blocks);
}

void keep_nccl_on_this_host() {
  ::setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/0);
}

}  // namespace echelon
