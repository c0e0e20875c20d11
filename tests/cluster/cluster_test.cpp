#include "echelon/cluster/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "echelon/cluster/catalogue.h"
#include "tests/support/error_text.h"

namespace echelon {
namespace cluster_test {

using testing::AllOf;
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
  const auto with = [&](const std::function<void(Cluster&)>& change) {
    Cluster bad = good;
    change(bad);
    return error_text<ConfigError>([&] { check(bad); });
  };
  EXPECT_THAT(
      with([](Cluster& c) { c.groups[1].node.network.bytes_per_second = 0; }),
      AllOf(
          HasSubstr("nodes 2 (h100-sxm)"),
          HasSubstr("network rate = 0.0 must be above 0")));
  EXPECT_THAT(
      with([](Cluster& c) { c.groups[0].node.inside.bytes_per_second = 0; }),
      HasSubstr("its 8 devices need a link"));
  EXPECT_THAT(
      with([](Cluster& c) { c.groups[0].node.host.latency_seconds = -1; }),
      HasSubstr("host latency = -1.0"));
  EXPECT_THAT(
      with([](Cluster& c) {
        c.groups[0].node.device.memory_bytes = std::nan("");
      }),
      HasSubstr("memory = nan must be above 0"));
  EXPECT_THAT(
      with([](Cluster& c) {
        c.groups[0].node.inside.bytes_per_second =
            std::numeric_limits<double>::infinity();
      }),
      HasSubstr("inside rate = inf"));
  EXPECT_THAT(
      with([](Cluster& c) { c.groups[0].count = 0; }), HasSubstr("count"));
  EXPECT_THAT(
      with([](Cluster& c) { c.groups[0].count = int64_t{1} << 62; }),
      HasSubstr("10 million"));
  EXPECT_THAT(
      with([](Cluster& c) { c.oversubscription = 0.5; }),
      HasSubstr("oversubscription = 0.5 must be at least 1.0"));
  EXPECT_THAT(
      with([](Cluster& c) { c.groups.clear(); }), HasSubstr("no nodes"));
  EXPECT_THAT(
      with([](Cluster& c) {
        c.groups[0].node.device.peak_flops_per_second.fill(0);
      }),
      HasSubstr("highest peak"));
  EXPECT_THAT(
      with([](Cluster& c) { c.groups[1].node.device.name = "a100-80gb"; }),
      HasSubstr("same name"));
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

}  // namespace cluster_test
}  // namespace echelon
