#include "echelon/planner/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/planner/reasons.h"
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

// Among strategies with equal state, the one with the least activations counts.
TEST(Plan, NoConstraintFindsACloserPlan) {
  const auto bytes =
      [](std::vector<std::pair<std::string, std::string>> fixed) {
        auto request =
            plan_request("llama3-70b", "h100-sxm:2", 8, std::move(fixed));
        request.compare = false;
        const auto result = plan(request);
        EXPECT_TRUE(result.plans.empty() && result.closest);
        return result.closest ? result.closest->step.memory.peak_bytes() : 0;
      };
  const double free = bytes({});
  for (const auto& [key, value] :
       {std::pair("microbatch", "1"), std::pair("tp", "2"),
        std::pair("pp", "2"), std::pair("schedule", "1f1b")}) {
    EXPECT_LE(free, bytes({{key, value}})) << key;
  }
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
  const auto text = refusal(plan_request("resnet50", "a100-40gb:128", 7));
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

TEST(Plan, APrecisionThatTheTrainerHasNotIsRefused) {
  auto request = plan_request("resnet50", "h100-sxm:8", 16);
  request.precision = cluster::Precision::fp8;
  EXPECT_TRUE(
      has(refusal(request),
          "--precision fp8: is for the linear layers of "
          "language models; take bf16"))
      << refusal(request);
  request = plan_request("gpt2", "b200:8", 16);
  request.precision = cluster::Precision::fp4;
  EXPECT_TRUE(
      has(refusal(request),
          "--precision fp4: echelon train computes in bf16, "
          "fp16, fp8, tf32, fp32 or fp64"))
      << refusal(request);
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

TEST(Plan, LeavesMemoryFree) {
  PlanRequest request = plan_request("llama3-8b", "h100-sxm:8", 64);
  const double usable = usable_device_bytes(request.cluster);
  request.cluster = with_free_memory(request.cluster, 0.25);
  EXPECT_NEAR(
      usable_device_bytes(request.cluster), 0.75 * usable, 1e-6 * usable);
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  for (const Plan& plan : result.plans) {
    EXPECT_LE(plan.step.memory.peak_bytes(), 0.75 * usable);
  }
}

// Small models, clusters and constraints, by chance.
class Chance {
 public:
  explicit Chance(uint32_t seed) : random_(seed) {}

  template <class Value>
  Value of(const std::vector<Value>& values) {
    return values[random_() % values.size()];
  }

  PlanRequest request() {
    PlanRequest request = plan_request(
        of<std::string>({"gpt2", "gpt2-xl", "llama3-8b", "llama2-13b"}),
        of<std::string>(
            {"a100-40gb:4", "a100-80gb:2x2", "h100-sxm:8", "h100-sxm:2x4",
             "v100:4x2", "a100-80gb:2x8", "a100-40gb:1x4+h100-sxm:1x4"}),
        of<int64_t>({4, 8, 12, 16, 32}));
    request.model.transformer->layers = of<int64_t>({2, 3, 4, 6, 8, 12, 16});
    request.seq_len = of<int64_t>({256, 1024, 2048});
    request.precision = usual_precision(request.cluster);
    request.compare = false;
    return request;
  }

  // A setting and one of the values that it may have.
  std::pair<std::string, std::string> constraint(const PlanRequest& request) {
    const SearchKey& key = find_search_key(of<std::string>(
        {"dp", "fsdp", "data", "tp", "pp", "microbatch", "microbatches",
         "schedule", "stages_per_rank", "stage", "gather", "recompute",
         "recompute_layers", "sequence_parallel", "order"}));
    SearchJob job;
    job.model = request.model;
    job.cluster = request.cluster;
    job.devices = request.cluster.num_devices();
    job.global_batch = request.global_batch;
    job.seq_len = request.seq_len;
    job.precision = request.precision;
    return {key.name, key.text_of(of(values_of(job, key)))};
  }

 private:
  std::mt19937 random_;
};

bool uses_host(const Plan& plan) {
  return plan.strategy.offload_optimizer || plan.strategy.offload_activations;
}

// The host's memory is left out: it is for what does not fit otherwise.
TEST(Plan, ConstraintsFindNoFasterStep) {
  Chance chance(7);
  int compared = 0;
  for (int round = 0; round < 200; ++round) {
    PlanRequest request = chance.request();
    const auto free = plan(request);
    request.fixed.push_back(chance.constraint(request));
    PlanResult fixed;
    try {
      fixed = plan(request);
    } catch (const ConfigError&) {
      continue;  // the setting has this value only beside others
    }
    if (fixed.plans.empty() || uses_host(fixed.plans[0])) continue;
    ++compared;
    ASSERT_FALSE(free.plans.empty());
    const double best = free.plans[0].step.step_seconds;
    EXPECT_LE(best, fixed.plans[0].step.step_seconds * (1 + 1e-9))
        << request.model.name << " " << request.model.transformer->layers
        << " layers on " << request.cluster.name << ", batch "
        << request.global_batch << ", " << request.fixed[0].first << "="
        << request.fixed[0].second
        << "\nfree:  " << cost::to_string(free.plans[0].strategy)
        << "\nfixed: " << cost::to_string(fixed.plans[0].strategy);
  }
  EXPECT_GT(compared, 150);
}

// By formulas, the layout of the fastest step is the fifth.
TEST(Plan, TheFastestStepIsFoundWhereFormulasRankItLow) {
  PlanRequest request =
      plan_request("llama3.1-405b", "h100-sxm:2048x8", 2048, {{"tp", "8"}});
  request.compare = false;
  request.keep = 3;
  const auto free = plan(request);
  request.fixed.emplace_back("schedule", "interleaved");
  const auto fixed = plan(request);
  ASSERT_FALSE(free.plans.empty());
  ASSERT_FALSE(fixed.plans.empty());
  EXPECT_LE(
      free.plans[0].step.step_seconds,
      fixed.plans[0].step.step_seconds * (1 + 1e-9));
}

}  // namespace echelon::planner::plan_test
