#include "echelon/pool/devices.h"

#include <gmock/gmock.h>

namespace echelon::pool::devices_test {

using testing::ElementsAre;
using testing::Pair;

std::vector<std::string> names_of(const PoolDevices& devices) {
  std::vector<std::string> names;
  for (const auto& device : devices.all) names.push_back(device.name);
  return names;
}

std::vector<int> groups_of(const PoolDevices& devices) {
  std::vector<int> groups;
  for (const auto& device : devices.all) groups.push_back(device.group);
  return groups;
}

TEST(PoolDevices, GpusAndSlicesByUuid) {
  cluster::LocalMachine machine;
  machine.nvml.gpus = {
      {.uuid = "GPU-a", .nvlinks = 18},
      {.uuid = "GPU-b", .slices = {"MIG-1", "MIG-2"}, .nvlinks = 18},
      {.uuid = "GPU-c", .nvlinks = 18},
      {.uuid = "GPU-d"}};
  const PoolDevices devices = find_devices(machine, 0, 0);
  EXPECT_TRUE(devices.gpus);
  EXPECT_THAT(
      names_of(devices),
      ElementsAre("GPU-a", "MIG-1", "MIG-2", "GPU-c", "GPU-d"));
  // Linked GPUs are one group, a GPU's slices another.
  EXPECT_THAT(groups_of(devices), ElementsAre(0, 2, 2, 0, 4));
  EXPECT_THAT(
      variables_of(true, {"GPU-a", "MIG-1"}),
      ElementsAre(
          Pair("CUDA_VISIBLE_DEVICES", "GPU-a,MIG-1"),
          Pair("ECHELON_POOL_DEVICES", "2")));
}

TEST(PoolDevices, SlotsWhereThereAreNoGpus) {
  cluster::LocalMachine machine;
  machine.cores = 3;
  EXPECT_THAT(
      names_of(find_devices(machine, 0, 0)), ElementsAre("0", "1", "2"));
  const PoolDevices slots = find_devices(machine, 4, 2);
  EXPECT_FALSE(slots.gpus);
  EXPECT_THAT(groups_of(slots), ElementsAre(0, 0, 1, 1));
  EXPECT_EQ(variables_of(false, {"1"})[0].first, "ECHELON_SLOTS");
}

}  // namespace echelon::pool::devices_test
