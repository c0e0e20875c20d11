// Compiled into libechelon_nccl.so. NVRTC compiles a source once for each kind
// of GPU, and the driver launches its functions.
#include "echelon/comm/nccl/kernel_launcher.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

#include "echelon/comm/nvrtc/kernel_cache.h"
#include "echelon/comm/nvrtc/kernel_compiler.h"

namespace echelon::nccl {
namespace {

// LibTorch has a small library that links NVRTC and the driver; what it links
// is found through it.
constexpr const char* kLibrary = "libcaffe2_nvrtc.so";

// Where the initialisation of a static throws, the next call tries it again.
const nvrtc::KernelCompiler& compiler() {
  static const nvrtc::KernelCompiler nvrtc_of_libtorch(kLibrary);
  return nvrtc_of_libtorch;
}

nvrtc::KernelCache& cache() {
  static nvrtc::KernelCache kernels(
      nvrtc::kernel_cache_folder(), [](const std::string& warning) {
        std::fprintf(stderr, "warning: %s\n", warning.c_str());
      });
  return kernels;
}

// The driver's functions.
class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  decltype(&cuModuleLoadData) load = nullptr;
  decltype(&cuModuleGetFunction) function = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;
  decltype(&cuDeviceGet) device = nullptr;
  decltype(&cuDeviceGetAttribute) attribute = nullptr;
  decltype(&cuCtxGetCurrent) context = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) make_context = nullptr;
  decltype(&cuCtxSetCurrent) set_context = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;

  std::string reason_of(CUresult result) const {
    const char* reason = nullptr;
    error_string(result, &reason);
    return reason != nullptr ? reason : "unknown error";
  }
  void check(CUresult result, const std::string& what) const {
    TORCH_CHECK(
        result == CUDA_SUCCESS, "kernel ", what, ": ", reason_of(result));
  }

 private:
  Driver() : library_(dlopen(kLibrary, RTLD_NOW)) {
    find(load, "cuModuleLoadData");
    find(function, "cuModuleGetFunction");
    find(launch, "cuLaunchKernel");
    find(device, "cuDeviceGet");
    find(attribute, "cuDeviceGetAttribute");
    find(context, "cuCtxGetCurrent");
    find(make_context, "cuDevicePrimaryCtxRetain");
    find(set_context, "cuCtxSetCurrent");
    find(error_string, "cuGetErrorString");
  }

  template <class Function>
  void find(Function& function, const char* name) {
    if (library_ != nullptr) {
      function = reinterpret_cast<Function>(dlsym(library_, name));
    }
    TORCH_CHECK(function != nullptr, kLibrary, " lacks ", name);
  }

  void* library_;
};

std::string architecture_of(CUdevice device) {
  const auto& driver = Driver::get();
  int major = 0, minor = 0;
  driver.check(
      driver.attribute(
          &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
      "architecture");
  driver.check(
      driver.attribute(
          &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
      "architecture");
  return "sm_" + std::to_string(10 * major + minor);
}

// Whether the driver takes the code. Throws for other errors.
bool takes_code(CUresult result) {
  switch (result) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
      return false;
    default:
      Driver::get().check(result, "loading");
      return true;
  }
}

// The kernels of `source` for a device whose context is current.
CUmodule loaded_module(std::string_view source, CUdevice device) {
  const nvrtc::KernelCompiler& kernel_compiler = compiler();
  const nvrtc::KernelRecipe recipe{
      .source = source,
      .architecture = architecture_of(device),
      .compiler = kernel_compiler.version(),
      .options = {"--std=c++17"}};
  const auto& driver = Driver::get();
  CUmodule module = nullptr;
  CUresult result = CUDA_SUCCESS;
  const bool taken = cache().load(
      recipe, [&] { return kernel_compiler.compile(recipe); },
      [&](const std::string& code) {
        result = driver.load(&module, code.data());
        return takes_code(result);
      });
  if (!taken) {
    throw nvrtc::KernelsUnavailable(
        "the driver refuses what " + kernel_compiler.version() +
            " compiles for " + recipe.architecture + ": " +
            driver.reason_of(result),
        "install a driver as new as LibTorch's CUDA");
  }
  return module;
}

// The code of one device.
struct LoadedKernels {
  std::mutex mutex;
  std::map<const void*, CUmodule> modules;  // by source
  std::map<std::pair<CUmodule, std::string>, CUfunction> functions;
};

// Each device has a lock of its own: loading may wait for the device, and the
// device for a collective that another rank of this process calls later.
LoadedKernels& kernels_of_device(int index) {
  static std::mutex mutex;
  static std::map<int, LoadedKernels> devices;
  const std::lock_guard lock(mutex);
  return devices[index];
}

// The device of the calling thread, with its context current.
CUdevice current_cuda_device(int index) {
  const auto& driver = Driver::get();
  CUdevice device = 0;
  driver.check(driver.device(&device, index), "device");
  CUcontext context = nullptr;
  driver.check(driver.context(&context), "context");
  if (context == nullptr) {  // a thread that has not computed there yet
    driver.check(driver.make_context(&context, device), "context");
    driver.check(driver.set_context(context), "context");
  }
  return device;
}

// The lock of `loaded` is held.
CUmodule
module_of(LoadedKernels& loaded, std::string_view source, int device_index) {
  compiler();  // first: it says why the library of both is missing
  const CUdevice device = current_cuda_device(device_index);
  auto& code = loaded.modules[source.data()];
  if (code == nullptr) code = loaded_module(source, device);
  return code;
}

CUfunction kernel_of(std::string_view source, const std::string& name) {
  const int index = c10::cuda::current_device();
  LoadedKernels& loaded = kernels_of_device(index);
  const std::lock_guard lock(loaded.mutex);
  const CUmodule code = module_of(loaded, source, index);
  auto& function = loaded.functions[{code, name}];
  if (function == nullptr) {
    const auto& driver = Driver::get();
    driver.check(driver.function(&function, code, name.c_str()), name);
  }
  return function;
}

}  // namespace

std::string prepare_kernels(std::string_view source) {
  const int index = c10::cuda::current_device();
  LoadedKernels& loaded = kernels_of_device(index);
  const std::lock_guard lock(loaded.mutex);
  try {
    module_of(loaded, source, index);
  } catch (const nvrtc::KernelsUnavailable& unavailable) {
    return unavailable.what();
  }
  return {};
}

void launch_kernel(
    std::string_view source, const std::string& name, int64_t blocks,
    int threads, void** arguments) {
  const CUfunction kernel = kernel_of(source, name);
  const auto& driver = Driver::get();
  driver.check(
      driver.launch(
          kernel, static_cast<unsigned>(blocks), 1, 1,
          static_cast<unsigned>(threads), 1, 1, /*sharedMemBytes=*/0,
          c10::cuda::getCurrentCUDAStream().stream(), arguments, nullptr),
      name);
}

}  // namespace echelon::nccl
