#include "echelon/cost/expert_load.h"

#include <gmock/gmock.h>

#include "echelon/cost/framework.h"
#include "echelon/cost/layer_work.h"
#include "echelon/cost/memory_estimate.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon::cost::expert_load_test {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(ExpertLoad, OfTheBusiestRank) {
  const ExpertLoad even;
  EXPECT_EQ(even.of_busiest_rank(1), 1);
  EXPECT_EQ(even.of_busiest_rank(8), 1);
  const ExpertLoad given{.busiest = 3};
  EXPECT_EQ(given.of_busiest_rank(1), 1);
  EXPECT_EQ(given.of_busiest_rank(2), 2);  // all tokens
  EXPECT_EQ(given.of_busiest_rank(4), 3);
  // Layers wait for another rank each.
  const ExpertLoad measured{.layers = {{5, 1, 1, 1}, {2, 2, 1, 3}}};
  EXPECT_EQ(measured.of_busiest_rank(1), 1);
  EXPECT_EQ(measured.of_busiest_rank(2), (6 * 2 / 8. + 4 * 2 / 8.) / 2);
  EXPECT_EQ(measured.of_busiest_rank(4), (5 * 4 / 8. + 3 * 4 / 8.) / 2);
  EXPECT_EQ(measured.of_busiest_rank(3), 1);  // experts do not divide
  EXPECT_EQ((ExpertLoad{.layers = {{0, 0}}}).of_busiest_rank(2), 1);
}

TEST(ExpertLoad, IsThatOfTheSecondHalfOfARun) {
  std::vector<timeline::StepMetrics> steps(6);
  EXPECT_THAT(measured_load(steps).layers, IsEmpty());
  steps[0].expert_loads = {{"a", {9, 0}, {}}, {"b", {9, 0}, {}}};
  steps[2].expert_loads = {{"a", {1, 2}, {}}, {"b", {3, 4}, {}}};
  steps[5].expert_loads = {{"a", {10, 20}, {1, 0}}, {"b", {30, 40}, {}}};
  EXPECT_THAT(
      measured_load(steps).layers,
      ElementsAre(ElementsAre(11, 22), ElementsAre(33, 44)));
}

double products_of(const ModelShape& model, const Strategy& strategy) {
  double flops = 0;
  for (const LayerWork& layer :
       layer_work(model, strategy, find_framework("echelon"))) {
    for (const Operation& one : layer.forward) {
      if (one.name.starts_with("experts ")) flops += one.flops;
    }
  }
  return flops;
}

double bytes_of(const ModelShape& model, const Strategy& strategy) {
  double bytes = 0;
  for (const LayerWork& layer :
       layer_work(model, strategy, find_framework("echelon"))) {
    for (const Operation& one : layer.forward) {
      if (one.name == "dispatch" || one.name == "combine") bytes += one.bytes;
    }
  }
  return bytes;
}

TEST(ExpertLoad, ItsRankComputesReceivesAndHoldsMore) {
  const ModelShape even = find_model("mixtral-8x7b");
  ModelShape uneven = even;
  uneven.expert_load.busiest = 1.5;
  for (const int64_t ep : {1, 4}) {
    const Strategy strategy{
        .layout = {.ep = ep}, .global_batch = 8, .microbatch_size = 1};
    const double ratio = ep == 1 ? 1 : 1.5;
    EXPECT_GT(products_of(even, strategy), 0);
    EXPECT_NEAR(
        products_of(uneven, strategy) / products_of(even, strategy), ratio,
        1e-6);
    if (ep > 1) {
      EXPECT_NEAR(
          bytes_of(uneven, strategy) / bytes_of(even, strategy), ratio, 1e-6);
    }
    const double more = estimate_memory(uneven, strategy).peak_bytes() -
                        estimate_memory(even, strategy).peak_bytes();
    // Two products' inputs and outputs: bf16, 32 layers, half of 2 copies more.
    EXPECT_GE(more, ep == 1 ? 0 : 32 * 4096. * 2 * 2 * 4096);
    EXPECT_LE(more, ep == 1 ? 0 : 32 * 4096. * 2 * (2 * 4096 + 4 * 14336));
  }
}

}  // namespace echelon::cost::expert_load_test
