#include "echelon/planner/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/simulator/simulate.h"
#include "tests/planner/search_job.h"
#include "tests/support/error_text.h"

namespace echelon::planner::plan_test {

std::string refusal(const PlanRequest& request) {
  return error_text<ConfigError>([&] { plan(request); });
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Plan, SaysWhyAndWhyNot) {
  const auto result = plan(plan_request("llama2-70b", "a100-80gb:64", 256));
  ASSERT_FALSE(result.plans.empty());
  const Plan& best = result.plans[0];
  EXPECT_TRUE(best.step.fits);
  EXPECT_EQ(best.strategy.layout.num_ranks(), 64);
  EXPECT_TRUE(has(result.reason.diagnosis, "llama2-70b"));
  EXPECT_EQ(result.reason.fix, to_string(best.strategy));
  EXPECT_FALSE(result.reason.why.empty());
  bool pure_data = false;
  for (const auto& other : result.others) {
    if (other.name != "pure data parallelism") continue;
    pure_data = true;
    EXPECT_TRUE(has(other.because, "needs")) << other.because;
  }
  EXPECT_TRUE(pure_data);
}

TEST(Plan, NothingFitsIsAnAnswer) {
  const auto result = plan(plan_request("gpt3-175b", "a100-80gb:8", 64));
  EXPECT_TRUE(result.plans.empty());
  ASSERT_TRUE(result.closest);
  EXPECT_FALSE(result.closest->step.fits);
  ASSERT_TRUE(result.smallest);
  EXPECT_TRUE(result.smallest->step.fits);
  EXPECT_GT(result.smallest->devices, 8);
  EXPECT_TRUE(has(result.reason.why, "suffice")) << result.reason.why;
  // The next smaller number of nodes does not do.
  PlanRequest smaller = plan_request("gpt3-175b", "a100-80gb:8", 64);
  EXPECT_TRUE(plans_on(smaller, result.smallest->devices - 8, 1).empty());
}

TEST(Plan, NothingFitsIsAnAnswerWhereWeightsAloneDoNotFit) {
  const auto result = plan(plan_request("llama3-70b", "h100-sxm:2", 8));
  EXPECT_TRUE(result.plans.empty());
  ASSERT_TRUE(result.closest);
  EXPECT_EQ(result.closest->strategy.layout.num_ranks(), 2);
  ASSERT_TRUE(result.smallest);
  EXPECT_TRUE(has(result.reason.fix, "needs")) << result.reason.fix;
  EXPECT_TRUE(has(result.reason.why, "suffice")) << result.reason.why;
}

TEST(Plan, TheClosestKeepsTheConstraints) {
  const auto result = plan(plan_request(
      "llama3-70b", "h100-sxm:8", 8,
      {{"recompute_layers", "2"}, {"devices", "2"}, {"offload", "none"}}));
  ASSERT_TRUE(result.closest);
  EXPECT_EQ(result.closest->strategy.recompute_layers, 2);
  EXPECT_EQ(result.closest->devices, 2);
  ASSERT_TRUE(result.smallest);
  EXPECT_EQ(result.smallest->strategy.recompute_layers, 2);
}

TEST(Plan, SettingsOfMemoryThatContradictEachOtherAreNamed) {
  const auto layers = refusal(plan_request(
      "llama3-8b", "h100-sxm:8", 64,
      {{"recompute", "none"}, {"recompute_layers", "3"}}));
  EXPECT_TRUE(has(layers, "recompute=none and recompute_layers=3")) << layers;
  const auto most = refusal(plan_request(
      "llama3-8b", "h100-sxm:8", 64, {{"recompute_layers", "500"}}));
  EXPECT_TRUE(has(most, "recompute_layers may be -1, 1, 2")) << most;
  PlanRequest other =
      plan_request("llama3-8b", "h100-sxm:8", 64, {{"offload", "optimizer"}});
  other.framework = "megatron-core";
  EXPECT_TRUE(has(refusal(other), "offload may be none")) << refusal(other);
}

TEST(Plan, ABatchThatNoLayoutDividesIsNamedWithTheNearest) {
  const auto text = refusal(plan_request("gpt2", "a100-40gb:128", 7));
  EXPECT_TRUE(has(text, "--batch 7")) << text;
  EXPECT_TRUE(has(text, " 8 would do")) << text;
}

TEST(Plan, ConstraintsThatContradictEachOtherAreNamed) {
  auto request = plan_request("gpt2", "a100-40gb:8", 16);
  request.fixed = {{"recompute", "none"}, {"tp", "4"}, {"pp", "4"}};
  const std::string text = refusal(request);
  EXPECT_TRUE(has(text, "tp=4") && has(text, "pp=4")) << text;
  EXPECT_FALSE(has(text, "recompute")) << text;

  request.fixed = {{"tp", "4"}, {"tp", "2"}};
  EXPECT_TRUE(has(refusal(request), "contradict"));
  request.fixed = {{"tp", "3"}};
  EXPECT_TRUE(has(refusal(request), "tp may be 1, 2, 4")) << refusal(request);
  request.fixed = {{"schedul", "1f1b"}};
  EXPECT_TRUE(has(refusal(request), "did you mean \"schedule\"?"));
  request.fixed = {{"schedule", "1f1"}};
  EXPECT_TRUE(has(refusal(request), "1f1b")) << refusal(request);
}

TEST(Plan, APrecisionThatADeviceHasNotIsRefused) {
  auto request = plan_request("gpt2", "v100:8", 16);
  const std::string text = refusal(request);
  EXPECT_TRUE(has(text, "--precision bf16: v100 does not compute in it"))
      << text;
  EXPECT_TRUE(has(text, "fp16")) << text;
  EXPECT_EQ(usual_precision(request.cluster), cluster::Precision::fp16);
  EXPECT_EQ(
      usual_precision(cluster::find_cluster("h100-sxm:8")),
      cluster::Precision::bf16);
  EXPECT_EQ(
      usual_precision(cluster::find_cluster("h100-sxm:1x8+v100:1x8")),
      cluster::Precision::fp16);
}

TEST(Plan, TheFewestDevicesAreEnough) {
  auto request = plan_request("llama2-7b", "a100-80gb:16", 32);
  request.objective = Objective::devices;
  request.fixed = {{"offload", "none"}, {"activations", "keep"}};
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  EXPECT_GT(result.plans[0].devices, 1);
  EXPECT_LT(result.plans[0].devices, 16);
  for (int64_t fewer = 1; fewer < result.plans[0].devices; fewer *= 2) {
    EXPECT_TRUE(plans_on(request, fewer, 1).empty()) << fewer;
  }
}

TEST(Plan, TheCheapestCostsNoMoreThanTheFastest) {
  auto request = plan_request("gpt2", "a100-40gb:16", 64);
  request.cluster.groups[0].node.device.price_per_hour = 2;
  const auto fast = plan(request);
  request.objective = Objective::cost;
  const auto cheap = plan(request);
  ASSERT_FALSE(fast.plans.empty() || cheap.plans.empty());
  EXPECT_GT(fast.plans[0].cost_per_step, 0);
  EXPECT_LE(cheap.plans[0].cost_per_step, fast.plans[0].cost_per_step);
  EXPECT_GE(
      cheap.plans[0].step.step_seconds,
      fast.plans[0].step.step_seconds * 0.999);
}

TEST(Plan, ExplainsAKeyByItsValues) {
  auto request = plan_request("gpt2-xl", "a100-40gb:8", 16);
  const auto rows = explain_key(request, "tp");
  ASSERT_GE(rows.size(), 1u);
  int best = 0;
  for (const auto& row : rows) best += row.because == "the best" ? 1 : 0;
  EXPECT_EQ(best, 1);
  EXPECT_THROW(explain_key(request, "tq"), ConfigError);
}

// Each by its events, as the best of all is: formulas may say less.
TEST(Plan, ValuesOfAKeyAreComparedAsTheyAreSimulated) {
  const auto request = plan_request("llama2-70b", "h100-sxm:32", 64);
  double fastest = std::numeric_limits<double>::infinity();
  for (const auto& row : explain_key(request, "pp")) {
    ASSERT_TRUE(row.plan) << row.value;
    if (!row.plan->step.fits) continue;
    const double seconds = row.plan->step.step_seconds;
    const auto simulated = simulator::simulate(
        request.model, row.plan->strategy, request.cluster,
        {.timeline_ranks = 0});
    EXPECT_EQ(seconds, simulated.step.step_seconds) << row.value;
    if (row.because == "the best") {
      EXPECT_LE(seconds, plan(request).plans.front().step.step_seconds);
    }
    fastest = std::min(fastest, seconds);
  }
  for (const auto& row : explain_key(request, "pp")) {
    EXPECT_EQ(
        row.plan->step.step_seconds == fastest, row.because == "the best");
  }
}

}  // namespace echelon::planner::plan_test
