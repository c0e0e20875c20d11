#include "echelon/pool/devices.h"

#include "echelon/text/format.h"

namespace echelon::pool {

PoolDevices find_devices(
    const cluster::LocalMachine& machine, int64_t slots, int64_t neighbours) {
  PoolDevices devices;
  const auto& gpus = machine.nvml.gpus;
  devices.gpus = slots == 0 && !gpus.empty();
  if (devices.gpus) {
    for (size_t i = 0; i < gpus.size(); ++i) {
      const int own = static_cast<int>(i);
      if (!gpus[i].slices.empty()) {
        for (const auto& slice : gpus[i].slices) {
          devices.all.push_back({slice, own + 1});
        }
      } else {
        devices.all.push_back(
            {gpus[i].uuid, gpus[i].nvlinks > 0 ? 0 : own + 1});
      }
    }
  } else {
    const int64_t count = slots > 0 ? slots : machine.cores;
    for (int64_t i = 0; i < count; ++i) {
      devices.all.push_back({std::to_string(i), 0});
    }
  }
  for (size_t i = 0; neighbours > 0 && i < devices.all.size(); ++i) {
    devices.all[i].group =
        static_cast<int>(i / static_cast<size_t>(neighbours));
  }
  return devices;
}

std::vector<std::pair<std::string, std::string>>
variables_of(bool gpus, const std::vector<std::string>& devices) {
  return {
      {gpus ? "CUDA_VISIBLE_DEVICES" : "ECHELON_SLOTS", join(devices, ",")},
      {"ECHELON_POOL_DEVICES", std::to_string(devices.size())}};
}

}  // namespace echelon::pool
