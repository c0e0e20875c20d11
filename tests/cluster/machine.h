// A machine of eight cores, with or without GPUs.
#pragma once

#include <utility>
#include <vector>

#include "echelon/cluster/local_machine.h"

namespace echelon::cluster {

inline LocalMachine test_machine(std::vector<Gpu> gpus = {}) {
  LocalMachine made;
  made.processor = {"Test 9000", 3e9, 64};
  made.cores = 8;
  made.memory = {64e9, 60e9, 0};
  made.nvml.gpus = std::move(gpus);
  return made;
}

}  // namespace echelon::cluster
