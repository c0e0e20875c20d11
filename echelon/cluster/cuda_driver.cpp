#include "echelon/cluster/cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "echelon/text/format.h"

namespace echelon::cluster {
namespace {

// CUresult
constexpr int kStubLibrary = 34;
constexpr int kNoDevice = 100;

constexpr int kCapabilityMajor = 75;  // CUdevice_attribute
constexpr int kCapabilityMinor = 76;
constexpr int kFirstWithBf16 = 80;  // Ampere

struct Uuid {
  unsigned char bytes[16];
};

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

std::string error_text(void* driver, int error) {
  using Text = int (*)(int, const char**);
  const char* name = nullptr;
  const char* text = nullptr;
  if (const auto get = symbol<Text>(driver, "cuGetErrorName")) {
    get(error, &name);
  }
  if (const auto get = symbol<Text>(driver, "cuGetErrorString")) {
    get(error, &text);
  }
  return format(
      "{}{}{}", name == nullptr ? format("error {}", error) : name,
      text == nullptr ? "" : ", ", text == nullptr ? "" : text);
}

// The UUID of a GPU, or of the MIG slice that stands for one.
std::string uuid_of(void* driver, int index) {
  using GetDevice = int (*)(int*, int);
  using GetUuid = int (*)(Uuid*, int);
  const auto get_device = symbol<GetDevice>(driver, "cuDeviceGet");
  auto get_uuid = symbol<GetUuid>(driver, "cuDeviceGetUuid_v2");
  if (get_uuid == nullptr) {
    get_uuid = symbol<GetUuid>(driver, "cuDeviceGetUuid");
  }
  int device = 0;
  Uuid uuid{};
  if (get_device == nullptr || get_uuid == nullptr ||
      get_device(&device, index) != 0 || get_uuid(&uuid, device) != 0) {
    return format("{}", index);
  }
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    constexpr const char* digits = "0123456789abcdef";
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

int capability_of(void* driver, int index) {
  using GetDevice = int (*)(int*, int);
  using GetAttribute = int (*)(int*, int, int);
  const auto get_device = symbol<GetDevice>(driver, "cuDeviceGet");
  const auto get = symbol<GetAttribute>(driver, "cuDeviceGetAttribute");
  int device = 0;
  int major = 0;
  int minor = 0;
  if (get_device == nullptr || get == nullptr ||
      get_device(&device, index) != 0 ||
      get(&major, kCapabilityMajor, device) != 0 ||
      get(&minor, kCapabilityMinor, device) != 0) {
    return 0;
  }
  return 10 * major + minor;
}

}  // namespace

CudaFindings ask_cuda(const char* library) {
  CudaFindings found;
  void* driver = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) {
    const char* reason = dlerror();
    found.reason = reason == nullptr ? "no reason given" : reason;
    return found;
  }
  found.library = true;  // it stays loaded: it cannot be unloaded
  using Init = int (*)(unsigned);
  using Get = int (*)(int*);
  const auto init = symbol<Init>(driver, "cuInit");
  const auto version = symbol<Get>(driver, "cuDriverGetVersion");
  const auto count = symbol<Get>(driver, "cuDeviceGetCount");
  if (init == nullptr || version == nullptr || count == nullptr) {
    found.error = kStubLibrary;
    return found;
  }
  version(&found.version);
  int devices = 0;
  found.error = init(0);
  if (found.error == 0) found.error = count(&devices);
  if (found.error != 0) {
    found.error_text = error_text(driver, found.error);
    return found;
  }
  for (int i = 0; i < devices; ++i) {
    found.gpus.push_back(uuid_of(driver, i));
    const int capability = capability_of(driver, i);
    found.capability =
        i == 0 ? capability : std::min(found.capability, capability);
  }
  return found;
}

bool has_bf16(const CudaFindings& found) {
  return found.capability >= kFirstWithBf16;
}

GpuSigns find_gpu_signs() {
  GpuSigns signs;
  for (int i = 0; i < 16 && !signs.device_file; ++i) {
    signs.device_file = ::access(format("/dev/nvidia{}", i).c_str(), F_OK) == 0;
  }
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr) signs.visible = visible;
  return signs;
}

std::string
why_unusable(const CudaFindings& found, const GpuSigns& signs, int cuda) {
  const bool hidden = signs.visible == "-1";
  if (!found.library) {
    if (!signs.device_file || hidden) return "";
    return format(
        "this machine has an NVIDIA GPU, but its driver cannot be loaded ({}); "
        "install the driver, or start the container with the driver's "
        "libraries (docker run --gpus all)",
        found.reason);
  }
  if (found.error == kStubLibrary) return "";
  const bool none =
      found.error == kNoDevice || (found.error == 0 && found.gpus.empty());
  if (none) {
    if (signs.visible.empty() || hidden) return "";
    return format(
        "CUDA_VISIBLE_DEVICES={} names no GPU of this machine; nvidia-smi -L "
        "lists them",
        signs.visible);
  }
  if (found.error != 0) {
    return format(
        "this machine has an NVIDIA GPU, but its driver does not start ({}); "
        "nvidia-smi says more",
        found.error_text);
  }
  if (found.version / 1000 < cuda) {
    return format(
        "the GPU's driver runs CUDA {}.{}, and LibTorch needs {}.0; install a "
        "newer driver, or a LibTorch for the driver's CUDA",
        found.version / 1000, found.version % 1000 / 10, cuda);
  }
  return "";
}

}  // namespace echelon::cluster
