// The devices that a pool hands out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/local_machine.h"

namespace echelon::pool {

struct PoolDevice {
  std::string name;  // "GPU-3f2c…", "MIG-…", or the number of a slot
  int group = 0;     // of NVLink neighbours
};

struct PoolDevices {
  std::vector<PoolDevice> all;
  bool gpus = false;  // else plain slots
};

/// `slots` plain slots; 0: the machine's GPUs, each slice (MIG) by itself where
/// a GPU is divided, or else a slot for each core. GPUs with NVLinks are
/// neighbours, and so are the slices of one GPU. `neighbours`: so many devices
/// in a row are, whatever the machine says; 0: as it says.
PoolDevices find_devices(
    const cluster::LocalMachine& machine, int64_t slots, int64_t neighbours);

/// The variables that show these devices to a job.
std::vector<std::pair<std::string, std::string>>
variables_of(bool gpus, const std::vector<std::string>& devices);

}  // namespace echelon::pool
