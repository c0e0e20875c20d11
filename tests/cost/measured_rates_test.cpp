// Seconds on devices whose rates were measured, against hand-computed ones.
#include "echelon/cost/device_rates.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "echelon/cluster/cluster_file.h"
#include "echelon/cost/operation_time.h"
#include "echelon/cost/step_estimate.h"
#include "echelon/simulator/simulate.h"

namespace echelon::cost::measured_rates_test {

// Two ranks on a processor: 10 us to start an operator, 30 of a gradient, links
// of 100 us and 1 GB/s.
constexpr const char* kHere = R"(
[devices.cpu]
memory = "8 GiB"
memory_rate = "4 GB/s"
peak = { fp32 = "40 GFLOP/s" }
launch = "10 us"
processor = true
launch_rates = [ { beside = "0 B", launch = "10 us", backward = "30 us" } ]
matrix_rates = [
  { precision = "fp32", m = 64, n = 64, k = 64, rate = "10 GFLOP/s" },
  { precision = "fp32", m = 1024, n = 64, k = 64, rate = "40 GFLOP/s" },
  { of = "convolution", precision = "fp32", m = 64, n = 16, k = 9, rate = "5 GFLOP/s" },
]
operator_rates = [
  { name = "add", bytes = "1 MB", rate = "16 GB/s" },
  { name = "add", bytes = "16 MB", rate = "4 GB/s" },
  { name = "gelu", bytes = "100 kB", rate = "2 GB/s" },
  { name = "gelu", bytes = "1 MB", rate = "2 GB/s" },
  { name = "optimizer adamw", bytes = "10 kB", rate = "7 GB/s" },
  { name = "optimizer adamw", bytes = "1 MB", rate = "7 GB/s" },
]

[[nodes]]
device = "cpu"
devices = 2
inside = { rate = "1 GB/s", latency = "100 us" }
network = { rate = "1 GB/s", latency = "100 us" }
host = { rate = "4 GB/s", latency = "1 us" }
)";

cluster::Cluster here() {
  return cluster::parse_cluster(kHere, "here.toml");
}
cluster::Device device() {
  return here().groups.front().node.device;
}

// The formulas' and the simulator's, which are equal.
double step_seconds(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  const double estimated = estimate_time(model, strategy, cluster).step_seconds;
  EXPECT_NEAR(
      simulator::simulate(model, strategy, cluster).step.step_seconds,
      estimated, estimated * 1e-3);
  return estimated;
}

double product(double m, double n, double k, double count = 1) {
  return measured_product_seconds(
             device(), cluster::ProductKind::product, cluster::Precision::fp32,
             m, n, k, count)
      .value();
}

TEST(MeasuredRates, AMeasuredShapeTakesWhatItTook) {
  EXPECT_NEAR(product(64, 64, 64), 2 * 64.0 * 64 * 64 / 10e9, 1e-12);
  EXPECT_NEAR(product(64, 64, 64, 3), 3 * product(64, 64, 64), 1e-12);
}

TEST(MeasuredRates, BetweenTwoShapesTheRateIsBetween) {
  // Halfway in the logarithm of m: the geometric mean of 10 and 40.
  EXPECT_NEAR(product(256, 64, 64), 2 * 256.0 * 64 * 64 / 20e9, 1e-12);
  EXPECT_LT(product(200, 64, 64) / 200, product(100, 64, 64) / 100);
}

// Rates that are powers of the sides are found between few shapes.
TEST(MeasuredRates, APlaneOfLogarithmsIsFound) {
  const auto rate = [](double m, double n, double k) {
    return 1e9 * std::pow(m, 0.5) * std::pow(n, 0.25) / std::pow(k, 0.125);
  };
  cluster::Device device;
  for (const int64_t m : {16, 256}) {
    for (const int64_t n : {16, 256}) {
      for (const int64_t k : {16, 256}) {
        const double here = rate(
            static_cast<double>(m), static_cast<double>(n),
            static_cast<double>(k));
        device.matrix_rates.push_back(
            {cluster::Precision::fp32, m, n, k, here});
      }
    }
  }
  for (const auto& [m, n, k] :
       {std::tuple(64.0, 64.0, 64.0), std::tuple(32.0, 100.0, 20.0)}) {
    const double seconds = measured_product_seconds(
                               device, cluster::ProductKind::product,
                               cluster::Precision::fp32, m, n, k)
                               .value();
    EXPECT_NEAR(2 * m * n * k / seconds / rate(m, n, k), 1, 0.05);
  }
}

// The plane may go on beyond all measured rates; the result stays between the
// least and the greatest of them.
TEST(MeasuredRates, NoRateIsBeyondThoseMeasured) {
  const auto seconds_at = [](double flat, double corner, double m, double n) {
    cluster::Device device;
    const int64_t side = m > 16 ? 16 : 256;  // the corner across
    device.matrix_rates.push_back(
        {cluster::Precision::fp32, side, side, 64, corner});
    for (const auto& [rows, columns] :
         {std::pair(16, 256), std::pair(256, 16)}) {
      device.matrix_rates.push_back(
          {cluster::Precision::fp32, rows, columns, 64, flat});
    }
    return measured_product_seconds(
               device, cluster::ProductKind::product, cluster::Precision::fp32,
               m, n, 64)
        .value();
  };
  EXPECT_NEAR(
      seconds_at(40e9, 10e9, 256, 256), 2 * 256.0 * 256 * 64 / 40e9, 1e-12);
  EXPECT_NEAR(seconds_at(10e9, 40e9, 16, 16), 2 * 16.0 * 16 * 64 / 10e9, 1e-12);
}

TEST(MeasuredRates, OnAProcessorNothingRunsBesideComputing) {
  for (const std::string& name : framework_names()) {
    const Framework framework = framework_on(find_framework(name), device());
    EXPECT_FALSE(framework.overlaps_gradients || framework.overlaps_parameters)
        << name;
    EXPECT_EQ(framework.hidden_tensor_parallel, 0) << name;
    EXPECT_EQ(framework.hidden_backward_tensor_parallel, 0) << name;
    EXPECT_EQ(framework.hidden_context_parallel, 0) << name;
    EXPECT_EQ(framework.hidden_expert_parallel, 0) << name;
  }
  cluster::Device gpu = device();
  gpu.processor = false;
  EXPECT_GT(
      framework_on(find_framework("megatron-core"), gpu).hidden_tensor_parallel,
      0);
}

TEST(MeasuredRates, AboveWhatWasMeasuredTheBordersRateCounts) {
  EXPECT_NEAR(product(1 << 20, 64, 64), 1024 * product(1024, 64, 64), 1e-9);
  EXPECT_NEAR(product(1024, 4096, 64), 64 * product(1024, 64, 64), 1e-9);
}

// A kernel has work of its own, however little it is given.
TEST(MeasuredRates, BelowWhatWasMeasuredTheBordersTimeCounts) {
  EXPECT_NEAR(product(1, 64, 64), product(64, 64, 64), 1e-12);
  EXPECT_NEAR(product(1, 8, 2, 3), 3 * product(64, 64, 64), 1e-12);
  // Short one way, long another.
  EXPECT_NEAR(product(1 << 20, 64, 1), product(1 << 20, 64, 64), 1e-9);
  const auto gelu = [](double bytes) {
    return measured_operator_seconds(device(), "gelu", bytes).value();
  };
  EXPECT_NEAR(gelu(10), gelu(1e5), 1e-12);
  EXPECT_EQ(gelu(0), 0);
}

TEST(MeasuredRates, KindsHaveTheirOwnRatesOrThoseOfProducts) {
  const auto seconds = [](cluster::ProductKind kind) {
    return measured_product_seconds(
        device(), kind, cluster::Precision::fp32, 64, 16, 9);
  };
  EXPECT_NEAR(
      *seconds(cluster::ProductKind::convolution), 2 * 64.0 * 16 * 9 / 5e9,
      1e-12);
  EXPECT_NEAR(
      *seconds(cluster::ProductKind::attention), 4 * 64.0 * 64 * 64 / 10e9,
      1e-12);
  EXPECT_FALSE(measured_product_seconds(
      device(), cluster::ProductKind::product, cluster::Precision::bf16, 64, 64,
      64));
}

TEST(MeasuredRates, OperatorsHaveTheirOwnRatesOrThoseOfAdd) {
  const auto seconds = [](const char* name, double bytes) {
    return measured_operator_seconds(device(), name, bytes).value();
  };
  EXPECT_NEAR(seconds("gelu", 3e6), 3e6 / 2e9, 1e-12);
  EXPECT_NEAR(seconds("add", 4e6), 4e6 / 8e9, 1e-12);  // halfway: sqrt(16 * 4)
  EXPECT_NEAR(seconds("tanh", 2e6), seconds("add", 2e6), 1e-15);
  EXPECT_NEAR(seconds("tanh", 1e9), 1e9 / 4e9, 1e-9);
  EXPECT_EQ(seconds("view", 0), 0);
  EXPECT_FALSE(measured_operator_seconds(cluster::Device{}, "add", 1e3));
}

// An addition to a sum moves three tensors. The sum, read and written, comes
// from the level of memory that the bytes moved since then still fit in.
TEST(MeasuredRates, AnAdditionToASumFindsItWhereOtherMemoryLeftIt) {
  const auto seconds = [](double bytes, double since) {
    return measured_operator_seconds(device(), "add", bytes, since).value();
  };
  EXPECT_NEAR(seconds(4e6, 16e6), 4e6 / 8e9 / 3 + 2 * 4e6 / 4e9 / 3, 1e-12);
  EXPECT_NEAR(seconds(4e6, 1e9), seconds(4e6, 16e6), 1e-9);
  EXPECT_EQ(seconds(4e6, 1e6), seconds(4e6, 0));
  // Small tensors that are parts of a large one do not take the least time
  // each.
  EXPECT_EQ(seconds(1e5, 2e5), seconds(1e5, 0));
  EXPECT_FALSE(measured_operator_seconds(cluster::Device{}, "add", 1e3, 1e6));
}

// A device's constants apply to that device alone.
TEST(MeasuredRates, CollectivesTakeWhatTheFileSays) {
  const cluster::Cluster cluster = here();
  const GroupPlace pair{.ranks = 2, .ranks_per_node = 2};
  const auto seconds = [&](CollectiveKind kind) {
    return collective_seconds(
        kind, 8e6, pair, cluster.node_of(0), cluster,
        find_framework("echelon"));
  };
  EXPECT_NEAR(seconds(CollectiveKind::all_reduce), 100e-6 + 8e-3, 1e-9);
  EXPECT_NEAR(seconds(CollectiveKind::all_gather), 100e-6 + 4e-3, 1e-9);
  EXPECT_NEAR(seconds(CollectiveKind::reduce_scatter), 100e-6 + 4e-3, 1e-9);
  EXPECT_NEAR(seconds(CollectiveKind::send), 100e-6 + 8e-3, 1e-9);
}

TEST(MeasuredRates, AWorseLatencyIsSeenInAnyCluster) {
  for (cluster::Cluster cluster :
       {here(),
        cluster::parse_cluster(
            "[[nodes]]\ndevice = \"a100-80gb\"\ndevices = 8\n", "a100.toml")}) {
    cluster::Node& node = cluster.groups.front().node;
    const GroupPlace pair{.ranks = 2, .ranks_per_node = 2};
    const auto seconds = [&] {
      return collective_seconds(
          CollectiveKind::all_reduce, 4096, pair, node, cluster,
          find_framework("echelon"));
    };
    const double before = seconds();
    node.inside.latency_seconds += 1e-3;
    EXPECT_NEAR(seconds() - before, 1e-3, 1e-9);
  }
}

// Operators as counted: a product of 10 GFLOP/s, a gelu and a view.
CountedLayer counted_layer() {
  CountedLayer layer{.name = "fc"};
  layer.parameters = 1000;
  layer.output_elements = 64;
  layer.counted_samples = 64;
  const CountedOperator mm{
      .name = "mm",
      .product = cluster::ProductKind::product,
      .count = 1,
      .m = 64,
      .n = 64,
      .k = 64};
  layer.forward = {mm, {.name = "gelu", .bytes = 2e5}, {.name = "view"}};
  layer.backward = {mm, mm};
  layer.backward[1].for_weight = true;
  return layer;
}

constexpr double kProduct = 2 * 64.0 * 64 * 64 / 10e9;
constexpr double kForward = kProduct + 2e5 / 2e9 + 3 * 10e-6;
constexpr double kBackward = 2 * (kProduct + 30e-6);

Strategy strategy(int64_t dp, int64_t batch) {
  Strategy made;
  made.layout.dp_replicate = dp;
  made.global_batch = batch;
  made.microbatch_size = batch / dp;
  made.precision = cluster::Precision::fp32;
  return made;
}

TEST(MeasuredRates, AProcessorLaunchesBesidesComputing) {
  const ModelShape model{.name = "one", .layers = {counted_layer()}};
  const StageTimes times = stage_times(model, strategy(1, 64), here());
  EXPECT_NEAR(times.stages[0].forward, kForward, 1e-9);
  EXPECT_NEAR(times.stages[0].backward, kBackward, 1e-9);
  EXPECT_NEAR(times.stages[0].backward_weight, kBackward / 2, 1e-9);
}

// Three microbatches of four add: launched as in a forward, both three times of
// four.
TEST(MeasuredRates, AnAdditionIsOfAllMicrobatchesButTheFirst) {
  CountedLayer layer = counted_layer();
  layer.backward.push_back(
      {.name = "add", .bytes = 1e6, .for_weight = true, .accumulates = true});
  const ModelShape model{.name = "one", .layers = {layer}};
  Strategy four = strategy(1, 256);
  four.microbatch_size = 64;
  const StageTimes times = stage_times(model, four, here());
  // Three products, a gelu and the sum itself.
  const double since = 3 * 3 * 64 * 64 * 4 + 2e5 + 1e6;
  const double add = *measured_operator_seconds(device(), "add", 1e6, since);
  EXPECT_NEAR(times.stages[0].backward, kBackward + 0.75 * (add + 10e-6), 1e-9);
  EXPECT_NEAR(
      operation_seconds(
          {.name = "gelu", .times = 0.25, .bytes = 2e5}, four, here()),
      0.25 * 2e5 / 2e9, 1e-12);
}

// Two operators of 64 KiB and a view: 1.5 times as long as where nothing is
// moved.
TEST(MeasuredRates, LaunchesTakeLongerBesideMuchMemory) {
  cluster::Cluster cluster = here();
  cluster::Device& device = cluster.groups.front().node.device;
  device.launch_rates = {
      {0, 10e-6, 30e-6, 1e-6, 3e-6}, {1 << 20, 20e-6, 90e-6, 2e-6, 9e-6}};
  const auto launched = [&](bool backward, bool view, double beside) {
    return measured_launch_seconds(device, {backward, view, beside});
  };
  EXPECT_NEAR(launched(false, false, 1 << 19), 15e-6, 1e-12);
  EXPECT_NEAR(launched(true, false, 1 << 19), 60e-6, 1e-12);
  EXPECT_NEAR(launched(true, false, 1 << 30), 90e-6, 1e-12);
  EXPECT_NEAR(launched(false, true, 1 << 19), 1.5e-6, 1e-12);
  EXPECT_NEAR(launched(true, true, 1 << 19), 6e-6, 1e-12);
  device.launch_rates.push_back({3 << 20, 40e-6, 90e-6, 2e-6, 9e-6});
  EXPECT_NEAR(launched(false, false, 2 << 20), 30e-6, 1e-12);
  device.launch_rates.pop_back();
  ModelShape model{.name = "one", .layers = {counted_layer()}};
  model.layers[0].forward = {
      {.name = "gelu", .bytes = 1 << 20}, {.name = "view"}};
  model.layers[0].backward = {};
  const StageTimes times = stage_times(model, strategy(1, 64), cluster);
  EXPECT_NEAR(times.stages[0].forward, (1 << 20) / 2e9 + 15e-6 + 1.5e-6, 1e-9);
}

TEST(MeasuredRates, GradientsAreNotHiddenBehindAProcessor) {
  const ModelShape model{.name = "one", .layers = {counted_layer()}};
  const cluster::Cluster cluster = here();
  const double reduce = 100e-6 + 1000 * 4 / 1e9;
  const double optimizer = 1000 * 28 / 7e9;
  const double expected = kForward + kBackward + reduce + optimizer;
  EXPECT_NEAR(
      estimate_time(model, strategy(2, 128), cluster).step_seconds, expected,
      1e-9);
  EXPECT_NEAR(
      simulator::simulate(model, strategy(2, 128), cluster).step.step_seconds,
      expected, 1e-9);
}

TEST(MeasuredRates, OperatorsGrowWithTheSamples) {
  ModelShape model{.name = "one", .layers = {counted_layer()}};
  model.layers[0].forward = {{.name = "gelu", .bytes = 2e5}};
  model.layers[0].backward = {};
  const StageTimes times = stage_times(model, strategy(1, 128), here());
  EXPECT_NEAR(times.stages[0].forward, 4e5 / 2e9 + 10e-6, 1e-9);
}

}  // namespace echelon::cost::measured_rates_test
