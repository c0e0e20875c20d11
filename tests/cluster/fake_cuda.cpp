// A stand-in for CUDA's driver. FAKE_CUDA_GPUS: the UUIDs of the visible GPUs,
// one character each, repeated to 16 bytes ("ab": two GPUs); FAKE_CUDA_MACHINE:
// instead of it, those of the machine, of which CUDA_VISIBLE_DEVICES ("0,2")
// shows some; FAKE_CUDA_INIT: what cuInit returns; FAKE_CUDA_VERSION: the
// newest CUDA that it runs; FAKE_CUDA_CAPABILITIES: each GPU's compute
// capability, two digits each ("9089": 9.0 and 8.9).
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace {

const char* text(const char* variable, const char* otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : value;
}

std::string gpus() {
  const std::string machine = text("FAKE_CUDA_MACHINE", "");
  if (machine.empty()) return text("FAKE_CUDA_GPUS", "ab");
  std::string visible;
  std::istringstream indices(text("CUDA_VISIBLE_DEVICES", ""));
  for (std::string index; std::getline(indices, index, ',');) {
    visible += machine.at(std::stoul(index));
  }
  return visible;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  return std::atoi(text("FAKE_CUDA_INIT", "0"));
}
int cuDriverGetVersion(int* version) {
  *version = std::atoi(text("FAKE_CUDA_VERSION", "13000"));
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(gpus().size());
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, gpus()[static_cast<size_t>(device)], 16);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute != 75 && attribute != 76) return 1;
  const std::string all = text("FAKE_CUDA_CAPABILITIES", "9090");
  const auto at = static_cast<size_t>(2 * device + attribute - 75);
  *value = all.at(at) - '0';
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuGetErrorString(int, const char** string) {
  *string = "system not yet initialized";
  return 0;
}

}  // extern "C"
