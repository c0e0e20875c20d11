#include "echelon/cluster/cluster.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>

#include "echelon/cluster/catalogue.h"
#include "tests/support/error_text.h"

namespace echelon::cluster::cluster_test {

using testing::HasSubstr;

TEST(Cluster, RanksFillGroupsInOrder) {
  const Cluster cluster = find_cluster("l4:2x4+h100-sxm:3x8");
  EXPECT_EQ(cluster.num_nodes(), 5);
  EXPECT_EQ(cluster.node_index(0), 0);
  EXPECT_EQ(cluster.node_index(7), 1);
  EXPECT_EQ(cluster.node_index(8), 2);
  EXPECT_EQ(cluster.node_index(31), 4);
  EXPECT_THAT(
      error_text<ConfigError>([&] { cluster.node_of(32); }),
      HasSubstr("no device 32, it has 32"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { cluster.node_index(-1); }),
      HasSubstr("no device -1"));
}

TEST(Cluster, FirstTakesWholeNodesThenAPart) {
  const Cluster cluster = find_cluster("l4:2x4+h100-sxm:3x8");
  for (int64_t devices = 1; devices <= cluster.num_devices(); ++devices) {
    const Cluster part = cluster.first(devices);
    ASSERT_EQ(part.num_devices(), devices);
    for (int64_t rank = 0; rank < devices; ++rank) {
      ASSERT_EQ(part.node_index(rank), cluster.node_index(rank)) << devices;
      ASSERT_EQ(part.node_of(rank).device, cluster.node_of(rank).device);
    }
  }
  EXPECT_EQ(cluster.first(32), cluster);
  EXPECT_THAT(
      error_text<ConfigError>([&] { cluster.first(33); }),
      HasSubstr("it has 32"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { cluster.first(0); }),
      HasSubstr("0 devices"));
}

TEST(Cluster, CheckNamesGroupKeyValueAndRule) {
  const Cluster good = find_cluster("a100-80gb:2x8+h100-sxm:2x8");
  EXPECT_NO_THROW(check(good));
  const struct {
    std::function<void(Cluster&, Node& first)> change;
    const char* says;
  } cases[] = {
      {[](Cluster& c, Node&) { c.groups[1].node.network.bytes_per_second = 0; },
       "nodes 2 (h100-sxm): network rate = 0.0 must be above 0"},
      {[](Cluster&, Node& n) { n.inside.bytes_per_second = 0; },
       "its 8 devices need a link"},
      {[](Cluster&, Node& n) { n.host.latency_seconds = -1; },
       "host latency = -1.0"},
      {[](Cluster&, Node& n) { n.device.memory_bytes = std::nan(""); },
       "memory = nan must be above 0"},
      {[](Cluster&, Node& n) {
         n.inside.bytes_per_second = std::numeric_limits<double>::infinity();
       },
       "inside rate = inf"},
      {[](Cluster& c, Node&) { c.groups[0].count = 0; }, "count"},
      {[](Cluster& c, Node&) { c.groups[0].count = int64_t{1} << 62; },
       "10 million"},
      {[](Cluster& c, Node&) { c.oversubscription = 0.5; },
       "oversubscription = 0.5 must be at least 1.0"},
      {[](Cluster& c, Node&) { c.groups.clear(); }, "no nodes"},
      {[](Cluster&, Node& n) { n.device.peak_flops_per_second.fill(0); },
       "highest peak"},
      {[](Cluster& c, Node&) { c.groups[1].node.device.name = "a100-80gb"; },
       "same name"}};
  for (const auto& one : cases) {
    Cluster bad = good;
    one.change(bad, bad.groups[0].node);
    EXPECT_THAT(
        error_text<ConfigError>([&] { check(bad); }), HasSubstr(one.says));
  }
}

TEST(Cluster, NothingThatTheHostDoesTakesLessThanNoTime) {
  const auto error_with = [](const std::function<void(Device&)>& change) {
    Cluster bad = find_cluster("a100-80gb:2x8");
    bad.groups[0].node.device.launch_rates = {{}};
    EXPECT_NO_THROW(check(bad));
    change(bad.groups[0].node.device);
    return error_text<ConfigError>([&] { check(bad); });
  };
  for (double LaunchRate::*part :
       {&LaunchRate::bytes_beside, &LaunchRate::seconds,
        &LaunchRate::backward_seconds, &LaunchRate::view_seconds,
        &LaunchRate::backward_view_seconds}) {
    EXPECT_THAT(
        error_with([&](Device& device) { device.launch_rates[0].*part = -1; }),
        HasSubstr("launch_rates: "));
  }
}

TEST(Cluster, OneDeviceNeedsNoLink) {
  Cluster alone = find_cluster("l4:1");
  alone.groups[0].node.inside = {};
  alone.groups[0].node.network = {};
  EXPECT_NO_THROW(check(alone));
}

TEST(Precision, Names) {
  for (Precision precision : kPrecisions) {
    EXPECT_EQ(precision_from_name(to_string(precision)), precision);
  }
  EXPECT_THAT(
      error_text<ConfigError>([] { precision_from_name("bfloat16"); }),
      HasSubstr("one of fp64, fp32, tf32, bf16, fp16, fp8, fp4"));
  EXPECT_THAT(
      error_text<ConfigError>([] { precision_from_name("bf61"); }),
      HasSubstr("did you mean \"bf16\"?"));
}

}  // namespace echelon::cluster::cluster_test
