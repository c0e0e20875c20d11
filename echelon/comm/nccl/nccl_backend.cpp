#include "echelon/comm/nccl/nccl_backend.h"

#include <dlfcn.h>

#include <string>

#include "echelon/comm/nccl/nccl_plugin.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr const char* kLibrary = "libechelon_nccl.so";

[[noreturn]] void
refuse(const std::string& reason, const std::string& way_out) {
  throw ConfigError(format("backend nccl: {}; {}", reason, way_out));
}

/// Asks the driver for the number of GPUs. Its library comes with the driver,
/// so without the library there is no GPU.
int count_devices() noexcept {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    return 0;
  }
  using Init = int (*)(unsigned);
  using GetCount = int (*)(int*);
  const auto init = reinterpret_cast<Init>(dlsym(driver, "cuInit"));
  const auto get_count =
      reinterpret_cast<GetCount>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  if (init == nullptr || get_count == nullptr || init(0) != 0 ||
      get_count(&count) != 0) {
    return 0;
  }
  return count;  // the driver stays loaded: it cannot be unloaded
}

const nccl::Plugin& open_plugin() {
  if (cuda_device_count() == 0) {
    refuse(
        "the CUDA driver reports no GPU on this machine",
        "use backend \"local\" on one host or \"gloo\" on several");
  }
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    refuse(
        format(
            "cannot load {} ({})", kLibrary,
            reason != nullptr ? reason : "no reason given"),
        "LibTorch needs all the CUDA wheels it asks for: install them with "
        "\"pip install torch==2.11.0\" and point ECHELON_LIBTORCH at its "
        "torch/ folder, or use backend \"local\" or \"gloo\"");
  }
  using Entry = const nccl::Plugin* (*)();
  const auto entry =
      reinterpret_cast<Entry>(dlsym(library, "echelon_nccl_plugin"));
  if (entry == nullptr || entry()->version != nccl::Plugin::kVersion) {
    refuse(
        format("{} belongs to another build of Echelon", kLibrary),
        "install the library and the program of one build");
  }
  return *entry();
}

const nccl::Plugin& plugin() {
  // The next call tries a failed initialisation again.
  static const nccl::Plugin& loaded = open_plugin();
  return loaded;
}

void check_device(int device_index) {
  const int count = plugin().device_count();
  if (device_index < 0 || device_index >= count) {
    refuse(
        format(
            "cuda:{} does not exist: {} GPU(s) are visible", device_index,
            count),
        "start at most one rank per GPU, or use backend \"local\", whose ranks "
        "share one");
  }
}

}  // namespace

int cuda_device_count() noexcept {
  static const int count = count_devices();
  return count;
}

void load_cuda() {
  plugin();
}

void set_cuda_device(int device_index) {
  check_device(device_index);
  plugin().set_device(device_index);
}

void synchronize_cuda_stream() {
  plugin().synchronize_current_stream();
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout, int device_index) {
  check_device(device_index);
  return plugin().make_backend(store, rank, size, timeout, device_index);
}

}  // namespace echelon
