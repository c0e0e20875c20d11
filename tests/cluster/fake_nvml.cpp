// A stand-in for the driver's library: two H100s whose 18 links end at a
// switch. FAKE_NVML_ERROR is what nvmlInit_v2 returns; FAKE_NVML_NAME is what
// the GPUs call themselves; FAKE_NVML_OLD is a driver that knows no links.
#include <cstdlib>
#include <cstring>

namespace {

struct Memory {
  unsigned long long total, free, used;
};

int first = 0, second = 1;

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

constexpr int kNotSupported = 3;

}  // namespace

extern "C" {

int nvmlInit_v2() {
  return number("FAKE_NVML_ERROR");
}
int nvmlShutdown() {
  return 0;
}

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::strncpy(text, "560.35.03", size);
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 12060;
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = index == 0 ? &first : &second;
  return 0;
}

int nvmlDeviceGetName(void*, char* text, unsigned size) {
  const char* name = std::getenv("FAKE_NVML_NAME");
  std::strncpy(text, name == nullptr ? "NVIDIA H100 80GB HBM3" : name, size);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  memory->total = 85520809984ULL;
  return 0;
}

int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* generation) {
  *generation = 5;
  return 0;
}

int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* width) {
  *width = 16;
  return 0;
}

int nvmlDeviceGetNvLinkState(void*, unsigned, unsigned* active) {
  if (number("FAKE_NVML_OLD") != 0) return kNotSupported;
  *active = 1;
  return 0;
}

int nvmlDeviceGetNvLinkVersion(void*, unsigned, unsigned* version) {
  *version = 4;
  return 0;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int* type) {
  *type = 2;
  return 0;
}

}  // extern "C"
