#include "echelon/cluster/local_cluster.h"

#include <gmock/gmock.h>
#include <stdlib.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "tests/cluster/machine.h"
#include "tests/support/error_text.h"
#include "tests/support/measured_desk.h"
#include "tests/support/temp_folder.h"

namespace echelon::cluster::local_cluster_test {

using testing::HasSubstr;

LocalMachine machine(size_t gpus) {
  return test_machine({gpus, {.name = "NVIDIA H100 80GB HBM3"}});
}

Cluster gpus(int64_t devices) {
  return parse_cluster(
      "[[nodes]]\ndevice = \"h100-sxm\"\ndevices = " + std::to_string(devices) +
          "\n",
      "gpus.toml");
}

// Which devices were asked for, and what was saved of them.
struct Saved {
  std::optional<Cluster> cluster;
  int64_t* asked;

  std::optional<Cluster> operator()(int64_t devices) const {
    *asked = devices;
    return cluster;
  }
};

TEST(LocalCluster, WhatWasMeasuredCountsMost) {
  int64_t asked = 0;
  const Cluster desk = parse_cluster(kMeasuredDesk, "desk.toml");
  const auto two = local_cluster(machine(0), Saved{desk, &asked}, 2, false);
  EXPECT_EQ(two.rates, RatesFrom::bench);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(two.cluster.name, "this machine as measured");
  EXPECT_EQ(two.cluster.groups, desk.groups);
  EXPECT_EQ(
      local_cluster(machine(2), Saved{gpus(2), &asked}, 0, false).rates,
      RatesFrom::bench);
  EXPECT_EQ(asked, 2);  // all GPUs
  local_cluster(machine(2), Saved{{}, &asked}, 0, true);
  EXPECT_EQ(asked, 8);  // all cores
}

TEST(LocalCluster, WhatWasMeasuredOfOtherDevicesDoesNot) {
  int64_t asked = 0;
  const Cluster desk = parse_cluster(kMeasuredDesk, "desk.toml");
  // GPUs are here now, or are not used.
  const LocalCluster by_catalogue =
      local_cluster(machine(2), Saved{desk, &asked}, 2, false);
  EXPECT_EQ(by_catalogue.rates, RatesFrom::catalogue);
  EXPECT_EQ(by_catalogue.cluster.groups[0].node.device.name, "h100-sxm");
  const LocalCluster guessed =
      local_cluster(machine(2), Saved{gpus(2), &asked}, 2, true);
  EXPECT_EQ(guessed.rates, RatesFrom::guess);
  EXPECT_EQ(guessed.cluster.groups[0].node.device.name, "cpu");
  EXPECT_EQ(
      local_cluster(machine(2), Saved{desk, &asked}, 2, true).rates,
      RatesFrom::bench);
  EXPECT_EQ(
      local_cluster(machine(0), Saved{{}, &asked}, 2, false).cluster.name,
      "this machine, rates guessed");
}

TEST(LocalCluster, IsWhatLocalStandsFor) {
  TempFolder folder;
  ::setenv("XDG_CONFIG_HOME", folder.path().c_str(), 1);
  EXPECT_THAT(find_cluster("local:2").name, HasSubstr("guessed"));
  const auto path = saved_cluster_path(2);
  folder.write(
      std::filesystem::relative(path, folder.path()).string(), kMeasuredDesk);
  const Cluster two = find_cluster("local:2");
  EXPECT_EQ(two.groups, parse_cluster(kMeasuredDesk, "desk.toml").groups);
  EXPECT_EQ(two.name, "this machine as measured");
  EXPECT_THAT(find_cluster("local:3").name, HasSubstr("guessed"));
  folder.write(
      std::filesystem::relative(path, folder.path()).string(), "nodes = 3\n");
  EXPECT_THAT(
      error_text<ConfigError>([] { find_cluster("local:2"); }),
      HasSubstr(path.string()));
  ::unsetenv("XDG_CONFIG_HOME");
}

}  // namespace echelon::cluster::local_cluster_test
