// What [layout] context = "auto" and overlap_chunks = 0 become for a job.
#include "echelon/predict/choices.h"

#include <gmock/gmock.h>

#include <string>

#include "echelon/predict/configured.h"
#include "echelon/predict/predict_run.h"

namespace echelon::predict::choices_test {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

Job job_of(const std::string& layout, const std::string& keys = "") {
  return parse_job(
      "[model]\nname = \"gpt\"\nlayers = 2\nhidden_size = 32\nheads = 4\n"
      "max_positions = 64\n[data]\nname = \"text\"\nsources = [\"a.txt\"]\n"
      "tokenizer = \"bytes\"\nsequence = 64\n[train]\nsteps = 5\nbatch = 4\n"
      "[layout]\n" +
          layout + "\n" + keys,
      "test.toml");
}

TEST(ChooseContext, SaysWhichWayAndWhy) {
  const Job job = job_of("cp = 4");
  EXPECT_TRUE(cost::is_open(job.context));
  const auto choice = choose_context(job, 4, /*on_processor=*/true);
  EXPECT_FALSE(cost::is_open(choice.options));
  EXPECT_THAT(
      choice.why, StartsWith("context: " + to_string(choice.options.way)));
  EXPECT_THAT(choice.why, HasSubstr("64 tokens and 4 heads"));
  for (const char* way : {"ring", "all_gather", "ulysses"}) {
    EXPECT_THAT(choice.why, HasSubstr(way));
  }
  EXPECT_THAT(choice.why, Not(HasSubstr("\n")));
}

TEST(ChooseContext, HeadsOfARankOfTpLimitWhoExchangesThem) {
  const auto choice =
      choose_context(job_of("cp = 4\ntp = 2"), 8, /*on_processor=*/true);
  EXPECT_NE(choice.options.way, ContextWay::ulysses);
  EXPECT_THAT(choice.why, HasSubstr("ulysses_ring of 2"));
}

TEST(ChooseContext, KeepsWhatIsSetAndCompletesGroups) {
  const auto kept =
      choose_context(job_of("cp = 4", "context = \"all_gather\""), 4, true);
  EXPECT_EQ(kept.options.way, ContextWay::all_gather);
  EXPECT_EQ(kept.why, "");
  EXPECT_EQ(choose_context(job_of("dp = 4"), 4, true).why, "");
  const auto grouped =
      choose_context(job_of("cp = 4", "context = \"ulysses_ring\""), 4, true);
  EXPECT_EQ(
      grouped.options, (ContextParallelOptions{ContextWay::ulysses_ring, 2}));
}

TEST(ChooseContext, AModelOfUnknownCostTakesTheRing) {
  Job job = job_of("cp = 2");
  job.model.name = kOwnModel;
  const auto choice = choose_context(job, 2, true);
  EXPECT_EQ(choice.options.way, ContextWay::ring);
  EXPECT_EQ(choice.why, "context: ring: the cost of this model is not known");
}

TEST(ChooseChunks, KeepsWhatIsSetAndIsOneOnProcessors) {
  EXPECT_EQ(
      choose_chunks(job_of("tp = 2", "overlap_chunks = 3"), 2, true).chunks, 3);
  const auto choice = choose_chunks(job_of("tp = 2"), 2, true);
  EXPECT_EQ(choice.chunks, 1);
  EXPECT_EQ(choice.why, "");
}

TEST(ChooseChunks, AModelOfUnknownCostHasNone) {
  Job job = job_of("tp = 2");
  job.model.name = kOwnModel;
  const auto choice = choose_chunks(job, 2, false);
  EXPECT_EQ(choice.chunks, 1);
  EXPECT_EQ(
      choice.why, "overlap_chunks: 1: the cost of this model is not known");
}

TEST(ChooseChunks, TheStrategyLeavesOpenWhatTheJobDoes) {
  EXPECT_EQ(configured_strategy(job_of("tp = 2")).product_chunks, 0);
  EXPECT_EQ(
      configured_strategy(job_of("tp = 2", "overlap_chunks = 3"))
          .product_chunks,
      3);
}

// The masks of documents and of dropout leave cut sequences no fused kernel.
TEST(ChooseContext, TheStrategyHasWhatAttentionMasks) {
  EXPECT_FALSE(configured_strategy(job_of("cp = 2")).masks_attention);
  Job dropout = job_of("cp = 2");
  dropout.model.dropout = 0.1;
  EXPECT_TRUE(configured_strategy(dropout).masks_attention);
  Job documents = job_of("cp = 2", "context = \"ulysses\"");
  documents.data.documents = Documents::respected;
  const auto strategy = configured_strategy(documents);
  EXPECT_TRUE(strategy.masks_attention);
  EXPECT_EQ(strategy.context.way, ContextWay::ulysses);
}

}  // namespace echelon::predict::choices_test
