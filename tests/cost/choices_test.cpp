// Chunks of matmuls of tensor parallelism: what they cost and which are chosen.
#include "echelon/cost/choices.h"

#include <gmock/gmock.h>

#include <utility>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/layer_builder.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/operation_time.h"
#include "echelon/cost/step_estimate.h"

namespace echelon::cost::choices_test {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kTensor = index_of(Axis::tp);

Strategy sharded(int64_t chunks, int64_t samples = 8, int64_t tp = 8) {
  return {
      .layout = {.tp = tp},
      .sequence_parallel = true,
      .product_chunks = chunks,
      .zero_stage = 0,
      .global_batch = samples,
      .microbatch_size = samples,
      .seq_len = 8192};
}

class ProductChunks : public testing::Test {
 protected:
  double block(const Strategy& strategy) const {
    return block_seconds(model_, strategy, cluster_);
  }
  PassSeconds forward(const Strategy& strategy) const {
    const Framework framework =
        framework_on(find_framework("echelon"), cluster_.node_of(0).device);
    return pass_seconds(
        layer_work(model_, strategy, framework).at(1).forward, strategy,
        cluster_, framework, 0);
  }

  ModelShape model_ = find_model("llama3.1-70b");
  cluster::Cluster cluster_ = cluster::find_cluster("h100-sxm:1x8");
};

TEST_F(ProductChunks, MoreChunksHideMoreAndTakeLonger) {
  PassSeconds before = forward(sharded(1));
  EXPECT_NEAR(before.exposed[kTensor], before.communication[kTensor], 1e-12);
  for (const int64_t chunks : {2, 4}) {
    const PassSeconds some = forward(sharded(chunks));
    EXPECT_LT(some.exposed[kTensor], 0.8 * before.exposed[kTensor]);
    // Each chunk has its own latency.
    EXPECT_GT(some.communication[kTensor], before.communication[kTensor]);
    EXPECT_GE(some.matrix, before.matrix);
    before = some;
  }
}

// All chunks but one are hidden where the matmul takes longer than they do, and
// otherwise as much of each as a chunk of the matmul takes.
TEST_F(ProductChunks, AMatmulHidesNoMoreThanItTakes) {
  const Framework& framework = find_framework("echelon");
  const Strategy strategy = sharded(4);
  // All seconds of the collectives, and the hidden ones.
  const auto seconds = [&](int64_t columns) {
    LayerBuilder one("layer", strategy, framework);
    one.collective_beside(
        "gather", CollectiveKind::all_gather, 1e9,
        {.m = 16384, .n = columns, .k = 8192, .chunks = 4, .batches = 8}, true);
    std::pair<double, double> sum;
    for (const Operation& operation : one.finish(0).forward) {
      sum.first += operation_seconds(operation, strategy, cluster_);
      sum.second += hidden_seconds(operation, strategy, cluster_);
    }
    return sum;
  };
  const auto [all, hidden] = seconds(65536);
  EXPECT_NEAR(hidden, 0.75 * all, 1e-9);
  const cluster::Device& device = cluster_.node_of(0).device;
  EXPECT_NEAR(
      seconds(128).second,
      3 *
          matrix_seconds(
              512, 128, 8192, strategy.precision, device, rates_of(device), 8,
              /*one_weight=*/true) /
          framework.compute_share,
      1e-9);
}

// The gradient of an input is summed while those of weights are computed.
TEST_F(ProductChunks, BackwardHidesSumsWithoutChunks) {
  Strategy strategy = sharded(1);
  strategy.sequence_parallel = false;
  const Framework& framework = find_framework("echelon");
  const auto work = layer_work(model_, strategy, framework).at(1);
  const PassSeconds backward =
      pass_seconds(work.backward_input, strategy, cluster_, framework, 0);
  EXPECT_GT(backward.communication[kTensor], 1e-4);
  EXPECT_LT(backward.exposed[kTensor], 0.3 * backward.communication[kTensor]);
}

TEST_F(ProductChunks, AreChosenWhereTheyPay) {
  const auto choice = choose_product_chunks(model_, sharded(0), cluster_);
  EXPECT_GT(choice.chunks, 1);
  for (const int64_t chunks : {1, 2, 4, 8}) {
    EXPECT_LE(block(sharded(choice.chunks)), 1.011 * block(sharded(chunks)))
        << chunks;
  }
  EXPECT_THAT(choice.why, StartsWith(std::to_string(choice.chunks) + ": "));
  EXPECT_THAT(choice.why, HasSubstr("8 sequences of 8,192 tokens"));
  // The chunks of one sequence have small matmuls for each rank's rows, which
  // share a weight.
  EXPECT_EQ(choose_product_chunks(model_, sharded(0, 1), cluster_).chunks, 2);
  // A matmul that is over at once hides nothing, and launches take longer.
  Strategy small = sharded(0, 1);
  small.seq_len = 64;
  EXPECT_EQ(choose_product_chunks(model_, small, cluster_).chunks, 1);
}

TEST_F(ProductChunks, WhatIsSetStaysAndOthersHaveNone) {
  EXPECT_EQ(choose_product_chunks(model_, sharded(3), cluster_).chunks, 3);
  EXPECT_EQ(
      choose_product_chunks(model_, sharded(0, 8, /*tp=*/1), cluster_).chunks,
      1);
  Strategy megatron = sharded(0);
  megatron.framework = "megatron-core";
  EXPECT_EQ(choose_product_chunks(model_, megatron, cluster_).chunks, 1);
  cluster::Cluster processors = cluster_;
  processors.groups.front().node.device.processor = true;
  EXPECT_EQ(choose_product_chunks(model_, sharded(0), processors).chunks, 1);
  EXPECT_EQ(with_choices(model_, sharded(0), processors).product_chunks, 1);
}

TEST_F(ProductChunks, TheStepIsShorterByWhatTheyHide) {
  const auto step = [&](int64_t chunks) {
    return estimate_step(model_, sharded(chunks), cluster_);
  };
  const Strategy chosen = with_choices(model_, sharded(0), cluster_);
  EXPECT_LT(
      estimate_step(model_, chosen, cluster_).step_seconds,
      0.98 * step(1).step_seconds);
  EXPECT_LT(step(4).parts.exposed[kTensor], step(1).parts.exposed[kTensor]);
}

// Layers that were counted say which matmul runs beside a collective.
TEST_F(ProductChunks, CountedCollectivesAreHiddenByTheirMatmuls) {
  CountedOperator gather{
      .name = "all_gather",
      .bytes = 1e8,
      .collective = CollectiveKind::all_gather};
  ModelShape model{.name = "counted", .layer_ranks = 8};
  model.layers = {{.name = "layer", .counted_samples = 8, .forward = {gather}}};
  const auto exposed = [&] {
    const auto read = parse_counted_model(counted_model_json(model), "test");
    EXPECT_EQ(read.layers, model.layers);
    const Framework& framework = find_framework("echelon");
    return pass_seconds(
               layer_work(read, sharded(1), framework).at(0).forward,
               sharded(1), cluster_, framework)
        .exposed[kTensor];
  };
  const double alone = exposed();
  EXPECT_GT(alone, 1e-4);
  auto& operation = model.layers[0].forward[0];
  operation.count = 1;
  operation.m = operation.n = operation.k = 16384;
  EXPECT_NEAR(exposed(), 0, 1e-12);
  operation.n = operation.k = 1024;
  EXPECT_GT(exposed(), 0.1 * alone);
  EXPECT_LT(exposed(), alone);
}

}  // namespace echelon::cost::choices_test
