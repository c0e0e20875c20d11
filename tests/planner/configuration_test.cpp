// `echelon train` accepts the planner's configuration and means the same by it.
#include "echelon/planner/configuration.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "echelon/error.h"
#include "echelon/job/check_job.h"
#include "echelon/predict/configured.h"
#include "tests/planner/search_job.h"
#include "tests/support/temp_folder.h"

namespace echelon::planner::configuration_test {

struct Case {
  const char* model;
  const char* cluster;
  int64_t batch;
  std::vector<std::pair<std::string, std::string>> fixed = {};
  cluster::Precision precision = cluster::Precision::bf16;
  int64_t seq_len = 0;
};

std::string name_of(const Case& one) {
  std::string text = std::string(one.model) + " on " + one.cluster +
                     ", batch " + std::to_string(one.batch);
  for (const auto& [key, value] : one.fixed) text += ", " + key + "=" + value;
  return text;
}

PlanRequest request_of(const Case& one) {
  auto request = plan_request(one.model, one.cluster, one.batch, one.fixed);
  request.seq_len = one.seq_len;
  request.precision = one.precision;
  request.simulate = false;
  request.compare = false;
  return request;
}

// Images of so many classes, without a pixel: nothing is decoded before a run.
std::string
image_folder(const TempFolder& folder, int64_t samples, int64_t classes) {
  for (int64_t i = 0; i < std::max(samples, classes); ++i) {
    folder.write(
        "images/" + std::to_string(i % classes) + "/" + std::to_string(i) +
            ".png",
        "");
  }
  return folder.path("images");
}

// The settings left to the user: enough samples for a batch, and the length.
Overrides users_part(const PlanRequest& request, const TempFolder& folder) {
  Overrides mine{
      .set = {"train.steps=1", "train.run=\"" + folder.path("run") + "\""}};
  const int64_t samples = 2 * request.global_batch + 2;
  if (!request.model.transformer) {
    const int64_t classes = request.model.name == "simple_cnn" ? 10 : 1000;
    mine.set.push_back(
        "data.path=\"" + image_folder(folder, samples, classes) + "\"");
    return mine;
  }
  const int64_t tokens =
      request.seq_len > 0 ? request.seq_len : request.model.seq_len;
  const std::string path = folder.write("tokens.bin", "");
  std::filesystem::resize_file(  // takes no room
      path, static_cast<uintmax_t>(samples * (tokens + 1) * 4));
  mine.set.insert(
      mine.set.end(),
      {"data.path=\"" + path + "\"", "data.token_bytes=4",
       "data.vocab_size=" + std::to_string(request.model.transformer->vocab)});
  return mine;
}

// Compares all but the number of recomputed layers, which the trainer derives
// from the budget when it has the model.
void expect_same(const cost::Strategy& planned, const cost::Strategy& read) {
  EXPECT_EQ(read.layout, planned.layout);
  EXPECT_EQ(read.zero_stage, planned.zero_stage);
  if (planned.zero_stage == 3) {
    EXPECT_EQ(read.unshard_once, planned.unshard_once);
  }
  EXPECT_EQ(read.global_batch, planned.global_batch);
  EXPECT_EQ(read.microbatch_size, planned.microbatch_size);
  EXPECT_EQ(read.num_microbatches(), planned.num_microbatches());
  EXPECT_EQ(read.rank_microbatch, planned.rank_microbatch);
  EXPECT_EQ(read.sequence_parallel, planned.sequence_parallel);
  EXPECT_EQ(read.precision, planned.precision);
  EXPECT_EQ(read.master, planned.master);
  EXPECT_EQ(read.optimizer, planned.optimizer);
  EXPECT_EQ(read.offload_optimizer, planned.offload_optimizer);
  EXPECT_EQ(read.offload_activations, planned.offload_activations);
  EXPECT_EQ(read.context, planned.context);
  EXPECT_EQ(read.masks_attention, planned.masks_attention);
  if (planned.recompute_layers < 0) {
    EXPECT_EQ(read.recompute, planned.recompute);
  }
  if (planned.layout.pp == 1) return;
  EXPECT_EQ(read.schedule, planned.schedule);
  EXPECT_EQ(read.stages_per_rank, planned.stages_per_rank);
  EXPECT_EQ(read.stage_layers, planned.stage_layers);
}

void expect_accepted(const Case& one) {
  SCOPED_TRACE(name_of(one));
  const PlanRequest request = request_of(one);
  const PlanResult result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  ASSERT_TRUE(is_trained_here(request.model));
  const TempFolder folder;
  const Overrides mine = users_part(request, folder);
  for (const Plan& plan : result.plans) {
    const std::string text = to_configuration(plan, request);
    SCOPED_TRACE(text);
    try {
      const Job job = load_job(folder.write("plan.toml", text), mine);
      const JobFacts facts = check_job(job, plan.devices);
      EXPECT_TRUE(facts.warnings.empty()) << facts.warnings.front();
      const predict::Configured read = predict::configured(job, facts);
      expect_same(plan.strategy, read.strategy);
      // Learned positions grow with the sequence.
      cost::ModelShape model = request.model;
      if (model.transformer && model.transformer->positions > 0) {
        auto& positions = model.transformer->positions;
        positions = std::max(positions, request.seq_len);
      }
      const double parameters = model.num_parameters();
      EXPECT_NEAR(
          static_cast<double>(facts.num_parameters), parameters,
          1e-3 * parameters);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST(PlanConfiguration, TrainAcceptsWhatIsPlanned) {
  for (const Case& one : std::vector<Case>{
           {"gpt2", "a100-40gb:1", 8},
           {"gpt2", "v100:8", 64, {}, cluster::Precision::fp16},
           {"gpt2-medium", "rtx-4090:4", 32, {}, cluster::Precision::fp32},
           {"gpt3-125m", "a100-40gb:4", 32, {}, cluster::Precision::fp64},
           {"gpt3-175b", "a100-80gb:1024", 1536},
           {"megatron-1t", "a100-80gb:3072", 3072},
           {"mpt-7b", "a100-40gb:64", 256},
           {"zb-gpt-6.2b", "a100-80gb:16", 48},
           {"llama-160m", "l4:4", 32},
           {"llama-1b", "l40s:6", 48},
           {"llama-8b", "h100-sxm:8", 64},
           {"llama-8b", "h100-sxm:8", 64, {}, cluster::Precision::fp8},
           {"llama2-13b", "mi300x:8", 60},
           {"llama3-8b", "h100-sxm:8x8", 256},
           {"llama3.1-70b", "h200:64", 512},
           {"llama3.2-3b", "b200:16", 128},
           {"llama3.1-405b", "h100-sxm:512", 1024},
           {"resnet50", "a100-40gb:16", 1024},
           {"resnet152", "v100:8", 512, {}, cluster::Precision::fp16},
           {"simple_cnn", "l4:2", 64}}) {
    expect_accepted(one);
  }
}

TEST(PlanConfiguration, TrainAcceptsEverySetting) {
  const auto with = [](std::vector<std::pair<std::string, std::string>> fixed) {
    expect_accepted({"llama2-7b", "a100-80gb:16", 64, std::move(fixed)});
  };
  for (const char* schedule :
       {"gpipe", "1f1b", "interleaved", "breadth_first", "zb-h1", "zb-h2",
        "zb-v", "dualpipev"}) {
    with({{"pp", "4"}, {"schedule", schedule}});
  }
  for (const char* stage : {"1", "2", "3"}) {
    with({{"fsdp", "8"}, {"stage", stage}});
  }
  with({{"fsdp", "16"}, {"gather", "use"}});
  with({{"fsdp", "16"}, {"gather", "step"}});
  for (const char* recompute : {"none", "selective", "all"}) {
    with({{"fsdp", "16"}, {"recompute", recompute}});
  }
  with({{"recompute", "all"}, {"recompute_layers", "3"}, {"fsdp", "16"}});
  with({{"fsdp", "16"}, {"offload", "optimizer"}});
  with({{"fsdp", "16"}, {"activations", "offload"}});
  with({{"tp", "4"}, {"sequence_parallel", "true"}});
  with({{"tp", "2"}, {"sequence_parallel", "false"}});
  with({{"fsdp", "4"}, {"tp", "2"}, {"pp", "2"}});
  with({{"microbatch", "1"}, {"pp", "1"}, {"fsdp", "16"}});
  for (const char* order :
       {"dp:fsdp:pp:cp:ep:tp", "pp:dp:fsdp:cp:ep:tp", "dp:pp:fsdp:cp:ep:tp"}) {
    with(
        {{"order", order},
         {"dp", "2"},
         {"fsdp", "2"},
         {"pp", "2"},
         {"tp", "2"}});
  }
}

// Nodes whose network is slow are for pipelines to cross.
TEST(PlanConfiguration, SaysTheOrderWhereItIsNotTheUsualOne) {
  const auto text_of = [](const Case& one) {
    const PlanRequest request = request_of(one);
    const auto plans = plan(request).plans;
    return plans.empty() ? "no plan" : to_configuration(plans[0], request);
  };
  const Case one{
      "llama2-7b", "a100-80gb:2x8", 64, {{"pp", "2"}, {"fsdp", "8"}}};
  EXPECT_NE(
      text_of(one).find("\norder = [\"pp\", \"fsdp\"]\n"), std::string::npos)
      << text_of(one);
  expect_accepted(one);
  Case within = one;
  within.cluster = "a100-80gb:1x16";
  EXPECT_EQ(text_of(within).find("order"), std::string::npos)
      << text_of(within);
}

// The second stage has a device of 40 GB in one pipeline, of 80 GB in the
// other.
TEST(PlanConfiguration, AStageHasTheMemoryOfItsSmallestDevice) {
  const auto request = request_of({"gpt2", "a100-40gb:1x3+h100-sxm:1x1", 8});
  Plan plan;
  plan.strategy.layout = {.dp_replicate = 2, .pp = 2};
  plan.strategy.global_batch = 8;
  plan.strategy.stage_layers = {5, 7};
  EXPECT_NE(
      to_configuration(plan, request)
          .find("device_bytes = [\"40 GiB\", \"40 GiB\"]"),
      std::string::npos)
      << to_configuration(plan, request);
}

// Stages and batches of several sizes.
TEST(PlanConfiguration, TrainAcceptsWhatIsPlannedForMixedClusters) {
  const char* mixed = "a100-80gb:1x8+h100-sxm:1x8";
  expect_accepted({"llama2-7b", mixed, 96, {{"pp", "2"}, {"tp", "8"}}});
  expect_accepted(
      {"gpt2-xl", mixed, 96, {{"pp", "4"}, {"schedule", "interleaved"}}});
  expect_accepted({"llama2-7b", mixed, 96, {{"pp", "1"}, {"tp", "4"}}});
  expect_accepted(
      {"llama3-8b",
       "v100:2x8+a100-40gb:1x8",
       240,
       {},
       cluster::Precision::fp16});
  expect_accepted(
      {"resnet50",
       "v100:1x4+a100-40gb:1x4",
       256,
       {{"pp", "2"}},
       cluster::Precision::fp16});
}

TEST(PlanConfiguration, TrainAcceptsLongerSequencesThanAModelUsuallyHas) {
  expect_accepted(
      {"gpt2", "a100-40gb:8", 32, {}, cluster::Precision::bf16, 4096});
  expect_accepted(
      {"llama-8b", "h100-sxm:8", 16, {}, cluster::Precision::bf16, 131072});
}

TEST(PlanConfiguration, TrainAcceptsCutSequences) {
  for (const char* cp : {"2", "8", "16"}) {
    expect_accepted(
        {"llama-8b",
         "h100-sxm:16",
         16,
         {{"cp", cp}},
         cluster::Precision::bf16,
         131072});
    expect_accepted(
        {"gpt2",
         "a100-40gb:16",
         16,
         {{"cp", cp}},
         cluster::Precision::fp32,
         8192});
  }
}

TEST(PlanConfiguration, TrainAcceptsMixturesOfExperts) {
  expect_accepted(
      {"mixtral-8x7b", "h100-sxm:64", 256, {{"ep", "8"}, {"cp", "1"}}});
  expect_accepted(
      {"qwen3-30b-a3b", "h100-sxm:16", 64, {{"ep", "4"}, {"cp", "1"}}});
  expect_accepted(
      {"deepseek-v2-lite", "h100-sxm:16", 64, {{"ep", "8"}, {"cp", "1"}}});
  expect_accepted({"deepseek-v3", "h100-sxm:1024", 1024, {{"cp", "1"}}});
}

TEST(PlanConfiguration, SaysWhatIsNotTrainedHere) {
  const Case one{"gpt-oss-20b", "h100-sxm:16", 64};
  const auto request = request_of(one);
  EXPECT_FALSE(is_trained_here(request.model));
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  const std::string text = to_configuration(result.plans[0], request);
  EXPECT_NE(text.find("gpt-oss-20b is none of them"), std::string::npos)
      << text;
}

}  // namespace echelon::planner::configuration_test
