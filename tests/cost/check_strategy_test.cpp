// Strategies that are none, and what is said of each.
#include "echelon/cost/step_estimate.h"

#include <gmock/gmock.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon::cost::check_strategy_test {

using ::testing::HasSubstr;

Strategy good() {
  return {.layout = {.dp_replicate = 2, .tp = 4, .pp = 4}, .global_batch = 32};
}

std::string problem_of(auto change, const char* model = "llama3-8b") {
  Strategy strategy = good();
  change(strategy);
  return check_strategy(
      find_model(model), strategy, cluster::find_cluster("h100-sxm:8x8"));
}

TEST(CheckStrategy, SaysNothingOfOneThatIs) {
  EXPECT_EQ(problem_of([](Strategy&) {}), "");
  for (const char* schedule :
       {"gpipe", "zb-h1", "zb-v", "interleaved", "dualpipev"}) {
    EXPECT_EQ(
        problem_of([&](Strategy& s) { s.schedule = schedule_kind(schedule); }),
        "")
        << schedule;
  }
  const auto experts = [](Strategy& s) {
    s.layout = {.dp_shard = 8, .ep = 8};
    s.global_batch = 64;
  };
  EXPECT_EQ(problem_of(experts, "mixtral-8x7b"), "");
  const auto replicas = [](Strategy& s) { s.layout = {.dp_replicate = 8}; };
  EXPECT_EQ(problem_of(replicas, "resnet50"), "");
}

// A change of a good strategy, and what is said of it.
struct Wrong {
  void (*change)(Strategy&);
  const char* said;
  const char* model = "llama3-8b";
};

TEST(CheckStrategy, NamesWhatDoesNotDivideAndWhatDoes) {
  EXPECT_EQ(
      problem_of([](Strategy& s) { s.layout.tp = 3; }),
      "tp=3 does not divide 32 heads; 1, 2, 4, 8, 16 and 32 do");
  EXPECT_EQ(
      problem_of([](Strategy& s) { s.global_batch = 33; }),
      "batch 33 does not divide over 2 data-parallel ranks in microbatches of "
      "1; a batch of 32 or 34 does");
  const Wrong cases[] = {
      {[](Strategy& s) { s.layout.pp = s.layout.tp = 8; },
       "are 128 ranks, but"},
      {[](Strategy& s) { s.layout = {.cp = 3}; },
       "cp=3 does not divide 8192 tokens"},
      {[](Strategy& s) { s.layout.ep = 2; },
       "the model has no experts; take ep=1"},
      {[](Strategy& s) {
         s.layout = {.ep = 3};
         s.global_batch = 3;
       },
       "ep=3 does not divide 8 experts; 1, 2, 4 and 8 do", "mixtral-8x7b"},
      {[](Strategy& s) { s.layout = {.cp = 2}; }, "images have no sequence",
       "resnet50"},
      {[](Strategy& s) { s.layout = {.tp = 2}; },
       "tp=2, but what ranks of tp compute and send is known of ", "resnet50"},
      {[](Strategy& s) { s.layout.tp = 0; }, "tp=0"},
      {[](Strategy& s) { s.microbatch_size = -1; }, "microbatch_size=-1"},
      {[](Strategy& s) { s.global_batch = 0; }, "global_batch=0"},
      {[](Strategy& s) { s.zero_stage = 4; }, "zero_stage=4"},
      {[](Strategy& s) { s.seq_len = -1; }, "must be 0 or more"},
      {[](Strategy& s) { s.stages_per_rank = -1; }, "must be 0 or more"}};
  for (const auto& [change, said, model] : cases) {
    EXPECT_THAT(problem_of(change, model), HasSubstr(said));
  }
}

TEST(CheckStrategy, NamesWhatTheScheduleNeeds) {
  const auto with = [](const char* schedule, int64_t pp, int64_t batch) {
    return problem_of([=](Strategy& s) {
      s.layout = {.pp = pp};
      s.schedule = schedule_kind(schedule);
      s.global_batch = batch;
    });
  };
  EXPECT_THAT(
      with("1f1b", 35, 64),
      HasSubstr("has 32 layers, an embedding and a head; take pp=34 or less"));
  EXPECT_EQ(with("1f1b", 34, 68), "");
  EXPECT_EQ(with("dualpipev", 1, 1), "") << "read in a pipeline";
  EXPECT_THAT(with("interleaved", 4, 6), HasSubstr("no multiple of pp=4"));
  EXPECT_THAT(with("dualpipev", 4, 6), HasSubstr("needs 8 or more"));
  EXPECT_THAT(
      problem_of([](Strategy& s) { s.stages_per_rank = 2; }),
      HasSubstr("1f1b has 1 stage per rank, not 2"));
}

TEST(CheckStrategy, StagesHaveAllLayersBetweenThem) {
  const auto with = [](const std::vector<int64_t>& layers) {
    return problem_of([&](Strategy& s) { s.stage_layers = layers; });
  };
  EXPECT_EQ(with({5, 9, 9, 9}), "");
  for (const auto& wrong :
       {std::vector<int64_t>{5, 9, 9},
        {5, 9, 9, 8},
        {14, 0, 9, 9},
        {16, 16},
        {5, 9, 9, 5, 4}}) {
    EXPECT_THAT(
        with(wrong),
        HasSubstr("they must be 4, each of 1 or more, and sum to 32"));
  }
}

}  // namespace echelon::cost::check_strategy_test
