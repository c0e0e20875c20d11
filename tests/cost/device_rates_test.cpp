#include "echelon/cost/device_rates.h"

#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"

namespace echelon::cost::device_rates_test {

double matrix_share(const std::string& name, const std::string& like = "") {
  return rates_of(cluster::Device{.name = name, .like = like}).matrix_share;
}

TEST(DeviceRates, EveryKindOfTheCatalogueThatWasMeasuredHasItsOwn) {
  const double unknown = DeviceRates{}.matrix_share;
  for (const char* name :
       {"v100", "v100-16gb", "a100-40gb", "a100-80gb", "h100-sxm", "h100-96gb",
        "h100-pcie", "h200", "gh200", "b200", "gb200", "b300", "gb300"}) {
    EXPECT_EQ(cluster::find_device(name).name, name);
    EXPECT_NE(matrix_share(name), unknown) << name;
  }
  EXPECT_NE(matrix_share("h100-96gb"), matrix_share("h100-sxm"));
}

TEST(DeviceRates, ANameThatMerelyBeginsLikeOneHasNotItsRates) {
  for (const char* name : {"a100-ours", "h100", "b200x", "v100-32gb", ""}) {
    EXPECT_EQ(matrix_share(name), DeviceRates{}.matrix_share) << name;
  }
  EXPECT_EQ(matrix_share("ours", "h100-sxm"), matrix_share("h100-sxm"));
  EXPECT_EQ(matrix_share("h100-sxm", "b200"), matrix_share("b200"));
}

TEST(DeviceRates, AClusterFileDeclaresThem) {
  const auto share = [](const std::string& device) {
    const cluster::Cluster cluster = cluster::parse_cluster(
        device + "[[nodes]]\ndevice = \"a100-big\"\ndevices = 1\n", "t.toml");
    return rates_of(cluster.groups[0].node.device).matrix_share;
  };
  EXPECT_EQ(
      share("[devices.a100-big]\nlike = \"a100-80gb\"\nmemory = \"96 GiB\"\n"),
      matrix_share("a100-80gb"));
  EXPECT_EQ(
      share(
          "[devices.a100-big]\nmemory = \"96 GiB\"\nmemory_rate = \"2 TB/s\"\n"
          "peak = { bf16 = \"312 TFLOP/s\" }\n"),
      DeviceRates{}.matrix_share);
}

TEST(DeviceRates, AnOffloadedOptimizerTakesAsLongAsTheHostsMemory) {
  Strategy strategy;
  strategy.layout.dp_replicate = 8;
  strategy.global_batch = 8;
  strategy.offload_optimizer = true;
  cluster::Cluster cluster;
  cluster.groups = {{cluster::usual_node("a100-80gb"), 1}};
  const ModelShape model = find_model("gpt2");
  const auto optimizer = [&](double rate) {
    cluster.groups[0].node.host_memory_bytes_per_second = rate;
    return estimate_time(model, strategy, cluster).parts.optimizer;
  };
  // 28 bytes a parameter at the share of the rate that an optimizer reaches.
  const double elements = 124.5e6;
  const double share =
      rates_of(cluster.groups[0].node.device).host_memory_share;
  EXPECT_NEAR(
      optimizer(10e9) - optimizer(20e9),
      elements * 28 / share * (1 / 10e9 - 1 / 20e9), 0.01 * optimizer(20e9));
  // Where the rate is not given, the link to the host limits; it is as fast.
  EXPECT_NEAR(
      optimizer(0),
      optimizer(cluster.groups[0].node.host.bytes_per_second / share), 1e-9);
}

}  // namespace echelon::cost::device_rates_test
