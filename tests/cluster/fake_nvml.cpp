// A stand-in for the driver's library: two H100s whose 18 links end at a
// switch. FAKE_NVML_ERROR is what nvmlInit_v2 returns; FAKE_NVML_NAME is what
// the GPUs call themselves; FAKE_NVML_OLD is a driver that knows no links.
// FAKE_NVML_SICK names what is wrong with the second one: lost, reset, ecc,
// pages, rows, hot or power. A file that FAKE_NVML_SICK_FILE names holds it, if
// it exists.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace {

struct Memory {
  unsigned long long total, free, used;
};

int first = 0, second = 1;
int slices[3] = {};  // of the second

int number(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

constexpr int kNotSupported = 3;
constexpr int kGpuIsLost = 15;
constexpr int kResetRequired = 16;

bool is_sick(void* device, const char* how) {
  const char* sick = std::getenv("FAKE_NVML_SICK");
  const char* path = std::getenv("FAKE_NVML_SICK_FILE");
  std::string what = sick == nullptr ? "" : sick;
  if (path != nullptr) std::ifstream(path) >> what;
  return device == &second && what == how;
}

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
  if (index > 1) return 6;  // not found
  *device = index == 0 ? &first : &second;
  return is_sick(*device, "lost") ? kGpuIsLost : 0;
}

int nvmlDeviceGetName(void*, char* text, unsigned size) {
  const char* name = std::getenv("FAKE_NVML_NAME");
  std::strncpy(text, name == nullptr ? "NVIDIA H100 80GB HBM3" : name, size);
  return 0;
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  const char* const names[] = {"MIG-one", "MIG-two", "MIG-three"};
  const char* name = device == &first ? "GPU-first" : "GPU-second";
  for (int i = 0; i < 3; ++i) {
    if (device == &slices[i]) name = names[i];
  }
  std::strncpy(text, name, size);
  return 0;
}

// FAKE_NVML_MIG: the second GPU is divided, and has this many slices of three.
int nvmlDeviceGetMigMode(void* device, unsigned* now, unsigned* after_reset) {
  *now = *after_reset =
      device == &second && number("FAKE_NVML_MIG") != 0 ? 1 : 0;
  return 0;
}

int nvmlDeviceGetMaxMigDeviceCount(void*, unsigned* count) {
  *count = 3;
  return 0;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void*, unsigned index, void** device) {
  if (static_cast<int>(index) >= number("FAKE_NVML_MIG")) return 6;
  *device = &slices[index];
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* name, void** device) {
  *device = &second;
  return std::strcmp(name, "GPU-second") == 0 ? 0 : 6;
}

int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = device == &second ? 1 : 0;
  return 0;
}

int nvmlDeviceGetTotalEccErrors(
    void* device, int type, int, unsigned long long* count) {
  *count = type == 1 && is_sick(device, "ecc") ? 3 : 0;
  return 0;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void* device, int* pending) {
  *pending = is_sick(device, "pages") ? 1 : 0;
  return 0;
}

int nvmlDeviceGetRemappedRows(
    void* device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
    unsigned* failed) {
  *corrected = *uncorrected = *pending = 0;
  *failed = is_sick(device, "rows") ? 1 : 0;
  return 0;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(
    void* device, unsigned long long* reasons) {
  *reasons = is_sick(device, "hot")     ? 0x40
             : is_sick(device, "power") ? 0x80
                                        : 0x1;  // idle
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  if (is_sick(device, "reset")) return kResetRequired;
  memory->total = 85520809984ULL;
  memory->used = 4000000000ULL;
  return 0;
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned* percent) {
  percent[0] = device == &second ? 50 : 25;  // of time
  percent[1] = 7;                            // of memory's time
  return 0;
}

int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  *celsius = 61;
  return 0;
}

int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 412500;
  return 0;
}

int nvmlDeviceGetClockInfo(void*, int type, unsigned* megahertz) {
  if (type != 1) return kNotSupported;
  *megahertz = 1980;
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
