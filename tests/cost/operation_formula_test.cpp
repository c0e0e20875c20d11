// Products and operators bound by memory against the terms of their formulas.
#include <gtest/gtest.h>

#include <cmath>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/operation_time.h"

namespace echelon::cost::operation_formula_test {

// No tiles, no launches, no cache: the roofline alone.
DeviceRates plain(double norm) {
  DeviceRates rates;
  rates.launch_seconds = 0;
  rates.cache_bytes = 0;
  rates.multiprocessors = 0;
  rates.roofline_norm = norm;
  return rates;
}

TEST(OperationFormula, ComputationAndMemoryOverlapAsTheNormSays) {
  const cluster::Device device = cluster::find_device("a100-80gb");
  const int64_t m = 4096, n = 4096, k = 512;
  for (const double norm : {1.0, 1.2, 3.0}) {
    const DeviceRates rates = plain(norm);
    const double compute =
        2.0 * m * n * k /
        (device.peak(cluster::Precision::bf16) * rates.matrix_share);
    const double bytes = 2.0 * (double(k) * (m + n) + double(m) * n);
    const double memory =
        bytes / (device.memory_bytes_per_second * rates.memory_share);
    EXPECT_NEAR(
        matrix_seconds(m, n, k, cluster::Precision::bf16, device, rates),
        std::pow(std::pow(compute, norm) + std::pow(memory, norm), 1 / norm),
        1e-12);
  }
}

TEST(OperationFormula, ALastWaveThatIsNotFullTakesAsLong) {
  const cluster::Device device = cluster::find_device("a100-80gb");
  DeviceRates rates = plain(1.2);
  const auto seconds = [&](int64_t rows) {
    return matrix_seconds(
        rows, 9 * 128, 16384, cluster::Precision::bf16, device, rates);
  };
  // 12 times 9 tiles of 256 rows are one wave of 108; 13 times 9 are not.
  EXPECT_NEAR(seconds(26 * 128) / seconds(24 * 128), 13.0 / 12, 0.02);
  rates.multiprocessors = 108;
  EXPECT_GT(seconds(26 * 128) / seconds(24 * 128), 1.3);
  EXPECT_NEAR(seconds(48 * 128) / seconds(24 * 128), 2, 0.1);
  // One wave of half of them: each loads more for what it computes.
  EXPECT_NEAR(seconds(12 * 128) / seconds(24 * 128), 0.5 / 0.96, 0.02);
}

// Rows in batches read the weight as often as the same rows in one matmul.
TEST(OperationFormula, BatchesOfOneWeightTakeAsLongAsOneMatmul) {
  const cluster::Device device = cluster::find_device("h100-sxm");
  const DeviceRates& rates = rates_of(device);
  const auto seconds = [&](int64_t m, int64_t count, bool one_weight) {
    return matrix_seconds(
        m, 14336, 8192, cluster::Precision::bf16, device, rates, count,
        one_weight);
  };
  EXPECT_NEAR(seconds(1024, 4, true), seconds(4096, 1, false), 1e-9);
  EXPECT_GT(seconds(1024, 4, false), 1.05 * seconds(4096, 1, false));
}

TEST(OperationFormula, RowsOfOddBytesAreSlow) {
  const cluster::Device device = cluster::find_device("a100-80gb");
  const DeviceRates rates = plain(1);
  const auto seconds = [&](int64_t k) {
    return matrix_seconds(
        8192, 8192, k, cluster::Precision::bf16, device, rates);
  };
  EXPECT_GT(seconds(8190), 1.4 * seconds(8192));
  EXPECT_GT(seconds(8191), 2 * seconds(8192));
  EXPECT_NEAR(seconds(8200) / seconds(8192), 1, 0.01);
}

TEST(OperationFormula, WhatFitsTheCacheMovesFaster) {
  const cluster::Device device = cluster::find_device("a100-80gb");
  DeviceRates rates = plain(1);
  const double alone = memory_seconds(1e6, device, rates);
  EXPECT_NEAR(
      alone, 1e6 / (device.memory_bytes_per_second * rates.memory_share),
      1e-15);
  rates.cache_bytes = 1e6;
  rates.cache_speedup = 3;
  EXPECT_NEAR(alone / memory_seconds(1e6, device, rates), 2, 1e-9);
  EXPECT_NEAR(
      memory_seconds(1e12, device, rates) / memory_seconds(1e11, device, rates),
      10, 0.01);
}

// Near a shape that was measured, within 5 % of its rate.
TEST(OperationFormula, AMeasuredRateReplacesTheFormula) {
  cluster::Device device = cluster::find_device("a100-80gb");
  device.matrix_rates = {
      {cluster::Precision::fp32, 64, 64, 64, 1e9},
      {cluster::Precision::fp32, 4096, 4096, 4096, 8e9}};
  const DeviceRates rates = plain(1);
  EXPECT_NEAR(
      matrix_seconds(100, 80, 64, cluster::Precision::fp32, device, rates),
      2.0 * 100 * 80 * 64 / 1e9, 5e-5);
  EXPECT_NEAR(
      matrix_seconds(3000, 3000, 3000, cluster::Precision::fp32, device, rates),
      2.0 * 27e9 / 8e9, 0.35);
}

TEST(OperationFormula, RanksOfExpertParallelismCutWhatIsNotAnExpert) {
  Strategy strategy;
  strategy.layout = {.dp_shard = 2, .cp = 3, .ep = 4};
  strategy.zero_stage = 1;
  EXPECT_EQ(zero_shards(strategy, find_framework("deepspeed"), false), 8);
  EXPECT_EQ(zero_shards(strategy, find_framework("deepspeed"), true), 2);
  for (const char* name : {"echelon", "fsdp"}) {  // the ranks of cp shard too
    EXPECT_EQ(zero_shards(strategy, find_framework(name), false), 24);
    EXPECT_EQ(zero_shards(strategy, find_framework(name), true), 6);
  }
  strategy.zero_stage = 0;
  EXPECT_EQ(zero_shards(strategy, find_framework("fsdp"), false), 1);
}

}  // namespace echelon::cost::operation_formula_test
