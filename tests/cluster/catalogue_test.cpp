#include "echelon/cluster/catalogue.h"

#include <gmock/gmock.h>

#include "tests/support/error_text.h"

namespace echelon::cluster::catalogue_test {

using testing::AllOf;
using testing::HasSubstr;

TEST(Catalogue, EveryDeviceHasANodeThatAJobCanRunOn) {
  for (const auto& name : device_names()) {
    SCOPED_TRACE(name);
    const Node node = usual_node(name);
    EXPECT_EQ(node.device, find_device(name));
    EXPECT_FALSE(node.device.source.empty());
    EXPECT_GT(node.network.bytes_per_second, 0);
    EXPECT_GT(node.network.latency_seconds, 0);
    EXPECT_GT(node.host.bytes_per_second, 0);
    EXPECT_GT(node.host_memory_bytes, node.device.memory_bytes);
    EXPECT_NO_THROW(check(Cluster{name, {{node, 3}}}));
  }
}

TEST(Catalogue, PeaksGrowAsPrecisionFalls) {
  for (const auto& name : device_names()) {
    SCOPED_TRACE(name);
    const Device device = find_device(name);
    double before = 0;
    for (Precision precision : kPrecisions) {
      if (device.peak(precision) == 0) continue;
      EXPECT_GE(device.peak(precision), before);
      before = device.peak(precision);
    }
  }
}

TEST(Catalogue, HasThePublishedFigures) {
  const Device h100 = find_device("h100-sxm");
  EXPECT_EQ(h100.peak(Precision::bf16), 989.4e12);
  EXPECT_EQ(h100.peak(Precision::fp4), 0);
  EXPECT_EQ(h100.memory_bytes_per_second, 3.35e12);
  EXPECT_EQ(find_device("v100").peak(Precision::bf16), 0);
  EXPECT_EQ(usual_node("gb200").num_devices, 72);
  EXPECT_EQ(usual_node("a100-80gb").network.bytes_per_second, 25e9);
}

TEST(Catalogue, UnknownDeviceNamesTheNearest) {
  EXPECT_THAT(
      error_text<ConfigError>([] { find_device("h100-smx"); }),
      AllOf(HasSubstr("did you mean \"h100-sxm\"?"), HasSubstr("mi300x")));
}

TEST(FindCluster, TakesNodesTimesDevices) {
  const Cluster cluster = find_cluster("h100-sxm:64x8");
  EXPECT_EQ(cluster.num_nodes(), 64);
  EXPECT_EQ(cluster.num_devices(), 512);
  EXPECT_FALSE(cluster.mixed());
  EXPECT_EQ(find_cluster("h100-sxm").num_devices(), 8);
  EXPECT_EQ(find_cluster("h100-sxm:64x2").groups[0].node.num_devices, 2);
}

TEST(FindCluster, TakesDevicesInUsualNodes) {
  EXPECT_EQ(find_cluster("a100-80gb:1024").num_nodes(), 128);
  const Cluster part = find_cluster("a100-80gb:20");
  EXPECT_EQ(part.num_nodes(), 3);
  EXPECT_EQ(part.num_devices(), 20);
  EXPECT_EQ(part.groups.back().node.num_devices, 4);
  EXPECT_EQ(find_cluster("a100-80gb:3").groups.size(), 1u);
}

TEST(FindCluster, TakesMixedOnes) {
  const Cluster mixed = find_cluster("a100-80gb:16x8+h100-sxm:8x8");
  EXPECT_TRUE(mixed.mixed());
  EXPECT_EQ(mixed.num_devices(), 192);
  EXPECT_EQ(mixed.node_of(127).device.name, "a100-80gb");
  EXPECT_EQ(mixed.node_of(128).device.name, "h100-sxm");
}

TEST(FindCluster, SaysWhichOfTheseATextIsNot) {
  const auto says = [](const std::string& text) {
    const std::string error =
        error_text<ConfigError>([&] { find_cluster(text); });
    EXPECT_LE(std::count(error.begin(), error.end(), '\n'), 4);
    return error;
  };
  EXPECT_THAT(
      says("h200-sxm:8"),
      AllOf(HasSubstr("in the catalogue"), HasSubstr("did you mean")));
  EXPECT_THAT(says("h100-sxm:"), HasSubstr("\"\" is no number of devices"));
  EXPECT_THAT(says("h100-sxm:8x"), HasSubstr("is no number of devices"));
  EXPECT_THAT(says("h100-sxm:0"), HasSubstr("\"0\" is no number"));
  EXPECT_THAT(says("h100-sxm:-8"), HasSubstr("\"-8\" is no number"));
  EXPECT_THAT(says("h100-sxm:8x8x8"), HasSubstr("\"8x8\" is no number"));
  EXPECT_THAT(says("h100-sxm:99999999999999999999"), HasSubstr("10 million"));
  EXPECT_THAT(says("h100-sxm:10000000x8"), HasSubstr("10 million"));
  EXPECT_THAT(says("h100-sxm:8+"), HasSubstr("name is missing"));
  EXPECT_THAT(says(""), HasSubstr("no name"));
  EXPECT_THAT(says("nowhere.toml"), HasSubstr("no such cluster file"));
  EXPECT_THAT(says("/"), HasSubstr("is a folder"));
  EXPECT_THAT(says("gh200:4x4"), HasSubstr("no link inside a node"));
}

}  // namespace echelon::cluster::catalogue_test
