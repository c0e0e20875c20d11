// Compiled into libechelon_nccl.so. NVRTC compiles a source once for each
// device, and the driver launches its functions.
#include "echelon/comm/nccl/kernel_launcher.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace echelon::nccl {
namespace {

// NVRTC's functions and the driver's. LibTorch has a small library that links
// both; what it links is found through it.
class KernelLibraries {
 public:
  using Program = void*;

  static const KernelLibraries& get() {
    static const KernelLibraries libraries;
    return libraries;
  }

  int (*create)(
      Program*, const char* source, const char* name, int num_headers,
      const char* const* headers, const char* const* header_names) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*compile)(Program, int, const char* const* options) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*binary_size)(Program, size_t*) = nullptr;
  int (*binary)(Program, char*) = nullptr;
  decltype(&cuModuleLoadData) load = nullptr;
  decltype(&cuModuleGetFunction) function = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;
  decltype(&cuDeviceGet) device = nullptr;
  decltype(&cuDeviceGetAttribute) attribute = nullptr;
  decltype(&cuCtxGetCurrent) context = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) make_context = nullptr;
  decltype(&cuCtxSetCurrent) set_context = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;

  void check(CUresult result, const std::string& what) const {
    if (result == CUDA_SUCCESS) return;
    const char* reason = nullptr;
    error_string(result, &reason);
    TORCH_CHECK(
        false, "kernel ", what, ": ",
        reason != nullptr ? reason : "unknown error");
  }

 private:
  KernelLibraries() : library_(dlopen("libcaffe2_nvrtc.so", RTLD_NOW)) {
    const char* reason = library_ != nullptr ? nullptr : dlerror();
    TORCH_CHECK(
        library_ != nullptr, "cannot load libcaffe2_nvrtc.so (",
        reason != nullptr ? reason : "no reason given",
        "); LibTorch needs all the CUDA wheels it asks for");
    find(create, "nvrtcCreateProgram");
    find(destroy, "nvrtcDestroyProgram");
    find(compile, "nvrtcCompileProgram");
    find(log_size, "nvrtcGetProgramLogSize");
    find(log, "nvrtcGetProgramLog");
    find(binary_size, "nvrtcGetCUBINSize");
    find(binary, "nvrtcGetCUBIN");
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
    function = reinterpret_cast<Function>(dlsym(library_, name));
    TORCH_CHECK(function != nullptr, "libcaffe2_nvrtc.so lacks ", name);
  }

  void* library_;
};

// The machine code of `source` for a device.
std::vector<char> compiled(const std::string& source, CUdevice device) {
  const auto& nvrtc = KernelLibraries::get();
  int major = 0, minor = 0;
  nvrtc.attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  nvrtc.attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  const std::string architecture =
      "--gpu-architecture=sm_" + std::to_string(10 * major + minor);
  const char* options[] = {architecture.c_str(), "--std=c++17"};
  KernelLibraries::Program program = nullptr;
  int failed =
      nvrtc.create(&program, source.c_str(), "kernel.cu", 0, nullptr, nullptr);
  if (failed == 0) failed = nvrtc.compile(program, 2, options);
  size_t size = 0;
  if (failed != 0) {
    std::string text;
    if (program != nullptr && nvrtc.log_size(program, &size) == 0) {
      text.resize(size);
      nvrtc.log(program, text.data());
    }
    TORCH_CHECK(
        false, "NVRTC cannot compile a kernel for sm_", 10 * major + minor,
        " (error ", failed, "):\n", text);
  }
  std::vector<char> code;
  if (nvrtc.binary_size(program, &size) == 0) {
    code.resize(size);
    nvrtc.binary(program, code.data());
  }
  nvrtc.destroy(&program);
  return code;
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

CUfunction kernel_of(std::string_view source, const std::string& name) {
  const auto& driver = KernelLibraries::get();
  const int index = c10::cuda::current_device();
  LoadedKernels& loaded = kernels_of_device(index);
  const std::lock_guard lock(loaded.mutex);
  CUdevice device = 0;
  driver.check(driver.device(&device, index), name);
  CUcontext context = nullptr;
  driver.check(driver.context(&context), name);
  if (context == nullptr) {  // a thread that has not computed there yet
    driver.check(driver.make_context(&context, device), name);
    driver.check(driver.set_context(context), name);
  }
  auto& code = loaded.modules[source.data()];
  if (code == nullptr) {
    const auto binary = compiled(std::string(source), device);
    driver.check(driver.load(&code, binary.data()), name);
  }
  auto& function = loaded.functions[{code, name}];
  if (function == nullptr) {
    driver.check(driver.function(&function, code, name.c_str()), name);
  }
  return function;
}

}  // namespace

void launch_kernel(
    std::string_view source, const std::string& name, int64_t blocks,
    int threads, void** arguments) {
  const CUfunction kernel = kernel_of(source, name);
  const auto& driver = KernelLibraries::get();
  driver.check(
      driver.launch(
          kernel, static_cast<unsigned>(blocks), 1, 1,
          static_cast<unsigned>(threads), 1, 1, /*sharedMemBytes=*/0,
          c10::cuda::getCurrentCUDAStream().stream(), arguments, nullptr),
      name);
}

}  // namespace echelon::nccl
