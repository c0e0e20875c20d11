#include "echelon/cluster/measured_machine.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "echelon/cluster/catalogue.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/error.h"
#include "tests/cluster/machine.h"

namespace echelon::cluster::measured_machine_test {

using testing::HasSubstr;

// all_reduces of 10 us and 2 GB/s among `ranks`.
MachineMeasurement measurement(int64_t ranks) {
  MachineMeasurement made;
  made.ranks = ranks;
  made.matrix_rates = {
      {Precision::fp32, 64, 64, 64, 20e9},
      {Precision::fp32, 2048, 1024, 1024, 80e9},
      {Precision::bf16, 64, 64, 64, 30e9}};
  made.matrix_rates.push_back(
      {Precision::fp32, 64, 16, 9, 5e9, ProductKind::convolution_weights});
  made.operator_rates = {{"add", 4096, 7e9}, {"gelu", 4096, 2e9}};
  made.memory_bytes_per_second = 7e9;
  made.launch_seconds = 1.5e-6;
  made.launch_rates = {{0, 1.5e-6, 2.50004e-6, 0.50004e-6, 0.60004e-6}};
  if (ranks == 1) return made;
  const auto n = static_cast<double>(ranks);
  for (int64_t bytes : {4096, 1 << 20, 16 << 20}) {
    made.calls.push_back(
        {"all_reduce", bytes,
         10e-6 + 2 * (n - 1) / n * static_cast<double>(bytes) / 2e9});
    made.calls.push_back({"send_recv", bytes, 1e-6});
  }
  return made;
}

TEST(MeasuredMachine, LinkIsTheDelayAndRateOfAllReduces) {
  for (int64_t ranks : {2, 3, 8}) {
    const Link link = link_of(measurement(ranks));
    EXPECT_NEAR(link.latency_seconds, 10e-6, 1e-9);
    EXPECT_NEAR(link.bytes_per_second, 2e9, 1e3);
  }
  // Noise: the larger one was quicker.
  MachineMeasurement odd = measurement(2);
  odd.calls = {{"all_reduce", 4096, 5e-3}, {"all_reduce", 1 << 20, 1e-3}};
  const Link link = link_of(odd);
  EXPECT_GT(link.bytes_per_second, 0);
  EXPECT_GE(link.latency_seconds, 0);
  EXPECT_THROW(link_of(measurement(1)), Error);
}

TEST(MeasuredMachine, AProcessorsSharesHaveTheMeasuredFigures) {
  const Cluster cluster = cluster_of(measurement(2), test_machine());
  ASSERT_EQ(cluster.num_devices(), 2);
  const Node& node = cluster.groups[0].node;
  EXPECT_EQ(node.device.name, "cpu");
  EXPECT_EQ(node.device.memory_bytes, 32e9);
  EXPECT_EQ(node.device.memory_bytes_per_second, 7e9);
  EXPECT_EQ(node.device.launch_seconds, 1.5e-6);
  EXPECT_EQ(
      node.device.launch_rates,
      (std::vector<LaunchRate>{{0, 1.5e-6, 2.5e-6, 0.5e-6, 0.6e-6}}));
  EXPECT_EQ(node.device.matrix_rates.size(), 4u);
  EXPECT_EQ(node.device.operator_rates, measurement(2).operator_rates);
  EXPECT_TRUE(node.device.processor);
  EXPECT_EQ(node.device.peak(Precision::fp32), 80e9);
  EXPECT_EQ(node.device.peak(Precision::bf16), 30e9);
  EXPECT_EQ(node.device.peak(Precision::fp64), 0);
  EXPECT_THAT(node.device.source, HasSubstr("2 ranks on Test 9000, 8 cores"));
  EXPECT_EQ(parse_cluster(to_toml(cluster), "x.toml"), cluster);
  EXPECT_EQ(cluster_of(measurement(1), test_machine()).num_devices(), 1);

  MachineMeasurement long_ones = measurement(1);
  long_ones.memory_bytes_per_second = 9069391473.09;
  long_ones.launch_seconds = 1.2180436e-6;
  const Device rounded =
      cluster_of(long_ones, test_machine()).groups[0].node.device;
  EXPECT_EQ(rounded.memory_bytes_per_second, 9.069e9);
  EXPECT_DOUBLE_EQ(rounded.launch_seconds, 1.218e-6);
}

TEST(MeasuredMachine, GpusOfTheCatalogueKeepTheirPeaks) {
  LocalMachine gpus = test_machine();
  const Gpu l4{.name = "NVIDIA L4", .memory_bytes = 24e9};
  gpus.nvml.gpus = {l4, l4};
  const Device device = cluster_of(measurement(2), gpus).groups[0].node.device;
  EXPECT_EQ(device.name, "l4");
  EXPECT_EQ(
      device.peak(Precision::bf16), find_device("l4").peak(Precision::bf16));
  EXPECT_EQ(device.memory_bytes_per_second, 7e9);

  const Gpu other{.name = "NVIDIA T4", .memory_bytes = 16e9};
  gpus.nvml.gpus = {other, other};
  const Cluster unknown = cluster_of(measurement(2), gpus);
  EXPECT_EQ(unknown.groups[0].node.device.name, "nvidia-t4");
  EXPECT_EQ(unknown.groups[0].node.device.memory_bytes, 16e9);
  EXPECT_EQ(unknown.groups[0].node.device.peak(Precision::fp32), 80e9);
  EXPECT_EQ(parse_cluster(to_toml(unknown), "x.toml"), unknown);
}

TEST(MeasuredMachine, IsToldAsTextAndJson) {
  MachineMeasurement made = measurement(2);
  made.launch_rates.push_back({32 << 10, 2e-6, 3e-6, 1e-6, 1e-6});
  made.operator_rates.push_back(
      {"max_pool2d_with_indices_backward channels last", 4096, 3e9});
  const std::string text = to_text(made);
  EXPECT_THAT(text, HasSubstr("2 ranks at once"));
  EXPECT_THAT(
      text, HasSubstr("product, fp32                            20.00 to 80.00 "
                      "GFLOP/s, 2 shapes\n"));
  EXPECT_THAT(text, HasSubstr("gelu"));
  EXPECT_THAT(text, HasSubstr("launched beside 32 KiB "));
  EXPECT_THAT(text, HasSubstr("  max_pool2d backward, channels last "));
  EXPECT_THAT(text, HasSubstr("all_reduce of 4096 bytes"));
  const auto json = nlohmann::json::parse(to_json(measurement(2)));
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["matrix_rates"].size(), 4u);
  EXPECT_EQ(json["matrix_rates"][3]["of"], "convolution weights");
  EXPECT_EQ(json["operator_rates"].size(), 2u);
  EXPECT_EQ(json["calls"].size(), 6u);
}

}  // namespace echelon::cluster::measured_machine_test
