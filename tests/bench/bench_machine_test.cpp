// Runs `echelon bench --save` as it is typed, and the commands that take its
// file.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "echelon/cluster/cluster_file.h"
#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::bench::bench_machine_test {

using testing::HasSubstr;
using testing_support::Command;
using testing_support::TempFolder;

const std::string kEchelon = program("echelon");

bool has_product(
    const cluster::Device& device, cluster::Precision precision,
    cluster::ProductKind kind) {
  return std::any_of(
      device.matrix_rates.begin(), device.matrix_rates.end(),
      [&](const cluster::MatrixRate& rate) {
        return rate.precision == precision && rate.kind == kind;
      });
}

bool has_operator(const cluster::Device& device, const std::string& name) {
  return std::any_of(
      device.operator_rates.begin(), device.operator_rates.end(),
      [&](const cluster::OperatorRate& rate) { return rate.name == name; });
}

TEST(BenchMachine, SavesAClusterThatStepsArePredictedOn) {
  const TempFolder folder;
  const std::string file = folder.path() + "/here.toml";
  // Without a visible GPU the rates are a processor's.
  const std::vector<std::string> processors = {"CUDA_VISIBLE_DEVICES="};
  Command bench({kEchelon, "bench", "--save", file, "-n", "2"}, processors);
  ASSERT_EQ(bench.wait(std::chrono::minutes(8)), 0) << bench.err();
  EXPECT_THAT(bench.out(), HasSubstr("launched beside 0 KiB"));

  const cluster::Cluster cluster = cluster::read_cluster(file);
  ASSERT_EQ(cluster.num_devices(), 2);
  const cluster::Node& node = cluster.groups[0].node;
  const cluster::Device& device = node.device;
  EXPECT_TRUE(device.processor);
  EXPECT_GT(node.inside.bytes_per_second, 0);
  EXPECT_GT(node.inside.latency_seconds, 0);
  EXPECT_GT(device.memory_bytes_per_second, 0);
  EXPECT_GT(device.peak(cluster::Precision::fp32), 0);
  for (const cluster::Precision precision :
       {cluster::Precision::fp32, cluster::Precision::bf16}) {
    EXPECT_TRUE(has_product(device, precision, cluster::ProductKind::product));
  }
  for (const cluster::ProductKind kind :
       {cluster::ProductKind::convolution,
        cluster::ProductKind::convolution_inputs,
        cluster::ProductKind::convolution_weights}) {
    EXPECT_TRUE(has_product(device, cluster::Precision::fp32, kind));
  }
  for (const char* name :
       {"gelu", "native_layer_norm", "optimizer adamw",
        "max_pool2d_with_indices channels last"}) {
    EXPECT_TRUE(has_operator(device, name)) << name;
  }
  ASSERT_GE(device.launch_rates.size(), 2U);
  for (const cluster::LaunchRate& rate : device.launch_rates) {
    EXPECT_GT(rate.seconds, 0);
    EXPECT_GT(rate.backward_seconds, 0);
    EXPECT_GT(rate.view_seconds, 0);
    EXPECT_GT(rate.backward_view_seconds, 0);
  }
  EXPECT_LT(
      device.launch_rates.front().bytes_beside,
      device.launch_rates.back().bytes_beside);
  Command step(
      {kEchelon, "simulate", source_path("examples/configs/digits.toml"),
       "--layout", "dp=2", "--cluster", file, "--count"});
  ASSERT_EQ(step.wait(), 0) << step.err();
  EXPECT_THAT(step.out(), HasSubstr("2 of 2 devices"));
}

}  // namespace echelon::bench::bench_machine_test
