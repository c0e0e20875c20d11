#include "echelon/timeline/metrics.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "echelon/timeline/rollback.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::timeline::metrics_test {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

StepMetrics step_metrics(int64_t step) {
  return {
      .step = step,
      .epoch = 0.1 * static_cast<double>(step),
      .loss = 1.0 / 3.0,
      .samples_per_second = 5120.25,
      .step_seconds = 0.0125,
      .data_seconds = 1e-7,
      .forward_seconds = 0.004,
      .backward_seconds = 0.007,
      .update_seconds = 0.001,
      .communication_seconds = 0.0005,
      .learning_rate = 1e-3,
      .grad_norm = 2.5,
      .slowest_rank = 1};
}

template <class Line>
void append_metrics(const std::string& path, const Line& line) {
  MetricsWriter(path).append(line);
}

class Metrics : public testing::Test {
 protected:
  TempFolder folder_;
  const std::string path_ = folder_.path("run/metrics.jsonl");
};

TEST_F(Metrics, DivisionsOfTheBatch) {
  const auto change = [](int64_t step) {
    return Rebalance{
        .step = step,
        .before = {32, 32},
        .seconds = {0.1, 0.3},
        .after = {48, 16}};
  };
  {
    MetricsWriter writer(path_, [] { return int64_t{0}; });
    writer.append(StepMetrics{.step = 1});
    writer.append(StepMetrics{.step = 2});
    writer.append(change(2));
    writer.append(StepMetrics{.step = 3});
    writer.append(change(3));
  }
  const Rebalance cut{
      .step = 3,
      .before = {4, 4, 4, 4},
      .seconds = {0.1, 0.3},
      .after = {5, 3, 5, 3},
      .of = Divided::layers,
      .expected_seconds = 0.2};
  append_metrics(path_, cut);
  EXPECT_EQ(read_metrics(path_).rebalances.at(2), cut);
  EXPECT_THAT(
      to_text(cut),
      HasSubstr("after step 3: pipeline ranks work 100 ms, 300 ms with stages "
                "of 4, 4, 4, 4 layers; from now on they have 5, 3, 5, 3, with "
                "which the slowest should work 200 ms instead of 300 ms"));
  EXPECT_EQ(truncate_metrics(path_, 2), "");
  {
    MetricsWriter writer(path_, [] { return int64_t{0}; });
    writer.append(StepMetrics{.step = 3});
    writer.append(change(3));
  }
  // Those that nobody can read are left out.
  std::ofstream(path_, std::ios::app)
      << R"({"step":4,"rebalance":{"before":[1],"seconds":[],"after":[2]}})"
      << "\n"
      << R"({"step":4,"rebalance":{"before":[0],"seconds":[1],"after":[2]}})"
      << "\n";
  auto file = read_metrics(path_);
  EXPECT_EQ(file.steps.size(), 3u);
  ASSERT_EQ(file.rebalances.size(), 2u);
  EXPECT_EQ(file.rebalances[0], change(2));
  EXPECT_EQ(file.rebalances[1], change(3));
  // A run that goes on from step 2 takes that one's.
  EXPECT_EQ(truncate_metrics(path_, 2), "");
  file = read_metrics(path_);
  EXPECT_EQ(file.steps.size(), 2u);
  ASSERT_EQ(file.rebalances.size(), 1u);
  EXPECT_EQ(file.rebalances[0], change(2));
}

TEST_F(Metrics, AreReadBackBitForBit) {
  const EvaluationMetrics evaluation = {
      .step = 2,
      .epoch = 1,
      .samples = 360,
      .accuracy = 0.1 + 0.2,
      .loss = 0.7,
      .seconds = 0.25};
  StepMetrics bare = {.step = 2, .loss = 0.5};
  {
    MetricsWriter writer(path_);
    writer.append(step_metrics(1));
    writer.append(bare);
    writer.append(evaluation);
  }
  append_metrics(path_, step_metrics(3));
  const auto file = read_metrics(path_);
  ASSERT_EQ(file.steps.size(), 3u);
  EXPECT_EQ(file.steps[0], step_metrics(1));
  EXPECT_EQ(file.steps[1], bare);
  EXPECT_EQ(file.steps[1].grad_norm, std::nullopt);
  EXPECT_EQ(file.steps[2], step_metrics(3));
  ASSERT_EQ(file.evaluations.size(), 1u);
  EXPECT_EQ(file.evaluations[0], evaluation);
  EXPECT_FALSE(file.truncated);
}

TEST_F(Metrics, OfTextsCountTokens) {
  StepMetrics step = step_metrics(1);
  step.tokens_per_second = 1.0 / 7;
  const EvaluationMetrics evaluation = {
      .step = 1,
      .samples = 4,
      .accuracy = 0.41067,
      .loss = 2.51036,
      .tokens = 4096,
      .perplexity = 12.309};
  append_metrics(path_, step);
  append_metrics(path_, evaluation);
  const auto file = read_metrics(path_);
  ASSERT_EQ(file.steps.size(), 1u);
  EXPECT_EQ(file.steps[0], step);
  ASSERT_EQ(file.evaluations.size(), 1u);
  EXPECT_EQ(file.evaluations[0], evaluation);
  EXPECT_EQ(
      to_text(evaluation),
      "perplexity 12.31, accuracy 41.07 % on 4096 held-out tokens, loss "
      "2.5104");
  EXPECT_EQ(
      to_text({.samples = 360, .accuracy = 0.9124, .loss = 0.29312}),
      "accuracy 91.24 % on 360 held-out samples, loss 0.2931");
}

TEST_F(Metrics, OfLowPrecisionAndOfEachLayer) {
  StepMetrics step = step_metrics(1);
  step.loss_scale = 0x1p-3;
  step.skipped_steps = 2;
  step.layer_grad_norms = {
      {"transformer.h.1", 0.1 + 0.2}, {"conv1", 0}, {"fc", kInf}};
  append_metrics(path_, step);
  EXPECT_EQ(read_metrics(path_).steps.at(0), step);
  EXPECT_THAT(
      read_file(path_),
      HasSubstr(
          "\"loss_scale\":0.125,\"skipped_steps\":2,\"layer_grad_norms\":{"
          "\"transformer.h.1\":0.30000000000000004,\"conv1\":0.0,"
          "\"fc\":null,\"fc_is\":\"inf\"}}"));
}

TEST_F(Metrics, OfExperts) {
  // Two layers of three experts: loads, then drops.
  const auto loads = expert_loads(
      {"model.layers.0.mlp", "model.layers.1.mlp"},
      {1, 2, 3, 0, 8, 1, 0, 0, 0, 0, 5, 0});
  ASSERT_EQ(loads.size(), 2u);
  EXPECT_EQ(loads[0].imbalance(), 1.5);
  EXPECT_EQ(imbalance_of(loads), 8 / 3.0);
  EXPECT_EQ(dropped_share(loads), 5 / 15.0);
  EXPECT_EQ(
      most_dropped(loads), "expert 1 of model.layers.1.mlp, 62 % of its own");
  EXPECT_EQ((ExpertLoads{.chosen = {0, 0}}).imbalance(), 0);
  StepMetrics step = step_metrics(1);
  step.expert_imbalance = imbalance_of(loads);
  step.dropped_share = 0.125;
  step.expert_loads = loads;
  append_metrics(path_, step);
  EXPECT_EQ(read_metrics(path_).steps.at(0), step);
  EXPECT_THAT(
      read_file(path_),
      HasSubstr(
          "\"dropped_share\":0.125,\"expert_loads\":{"
          "\"model.layers.0.mlp\":[1,2,3],\"model.layers.1.mlp\":[0,8,1]},"
          "\"expert_drops\":{\"model.layers.1.mlp\":[0,5,0]}}"));
}

TEST_F(Metrics, OneObjectALineInAFixedOrder) {
  append_metrics(path_, StepMetrics{.step = 7, .loss = 0.5});
  append_metrics(path_, EvaluationMetrics{.step = 7, .accuracy = 0.75});
  EXPECT_EQ(
      read_file(path_),
      "{\"step\":7,\"epoch\":0.0,\"loss\":0.5,\"samples_per_second\":0.0,"
      "\"step_seconds\":0.0,\"data_seconds\":0.0,\"learning_rate\":0.0}\n"
      "{\"step\":7,\"evaluation\":{\"epoch\":0.0,\"samples\":0,"
      "\"accuracy\":0.75,\"loss\":0.0,\"seconds\":0.0}}\n");
}

TEST_F(Metrics, LinesOfQuickStepsAreWrittenTogether) {
  int64_t now_ns = 0;
  MetricsWriter writer(path_, [&] { return now_ns; });
  const auto steps = [&] { return read_metrics(path_).steps.size(); };
  const auto append_at = [&](int64_t milliseconds) {
    now_ns = milliseconds * 1'000'000;
    writer.append(step_metrics(milliseconds));
    return steps();
  };
  EXPECT_EQ(append_at(1), 1u);  // the first is there at once
  EXPECT_EQ(append_at(2), 1u);
  EXPECT_EQ(append_at(50), 1u);
  EXPECT_EQ(append_at(51), 4u);
  EXPECT_EQ(append_at(52), 4u);
  EXPECT_EQ(append_at(152), 6u);
  EXPECT_EQ(append_at(252), 7u);  // slow steps: each at once
  EXPECT_EQ(append_at(253), 7u);
  writer.flush();
  EXPECT_EQ(steps(), 8u);
  EXPECT_EQ(append_at(254), 8u);
  writer.append(EvaluationMetrics{.step = 254});
  EXPECT_EQ(steps(), 9u);
  EXPECT_EQ(read_metrics(path_).evaluations.size(), 1u);
  std::vector<int64_t> order;
  for (const auto& step : read_metrics(path_).steps) order.push_back(step.step);
  EXPECT_THAT(order, ElementsAre(1, 2, 50, 51, 52, 152, 252, 253, 254));
}

TEST_F(Metrics, AWriterThatEndsWritesWhatItKept) {
  const auto begin = [&] {
    MetricsWriter writer(path_, [] { return int64_t{0}; });
    for (const int64_t step : {1, 2, 3}) writer.append(step_metrics(step));
    throw Error("a peer is gone");
  };
  EXPECT_THROW(begin(), Error);
  EXPECT_EQ(read_metrics(path_).steps.size(), 3u);
}

TEST_F(Metrics, WhatIsNotFiniteIsNullAndNamed) {
  append_metrics(path_, StepMetrics{.step = 1, .loss = kNan});
  append_metrics(path_, StepMetrics{.step = 2, .loss = kInf});
  append_metrics(path_, StepMetrics{.step = 3, .loss = 1, .grad_norm = -kInf});
  const auto text = read_file(path_);
  EXPECT_THAT(text, HasSubstr("\"loss\":null,\"loss_is\":\"nan\""));
  EXPECT_THAT(text, HasSubstr("\"loss\":null,\"loss_is\":\"inf\""));
  EXPECT_THAT(text, HasSubstr("\"grad_norm\":null,\"grad_norm_is\":\"-inf\""));
  const auto file = read_metrics(path_);
  EXPECT_TRUE(std::isnan(file.steps.at(0).loss));
  EXPECT_EQ(file.steps.at(1).loss, kInf);
  EXPECT_EQ(file.steps.at(2).grad_norm, -kInf);
}

TEST_F(Metrics, HalfALastLineIsLeftOutWhereverItWasCut) {
  append_metrics(folder_.path("whole"), step_metrics(1));
  const auto line = read_file(folder_.path("whole"));
  for (size_t cut = 1; cut < line.size(); ++cut) {
    const auto path = folder_.write("cut", line + line.substr(0, cut));
    const auto file = read_metrics(path);
    EXPECT_EQ(file.steps.size(), 1u) << cut;
    EXPECT_TRUE(file.truncated) << cut;
  }
}

TEST_F(Metrics, AWriterCutsHalfALineBackBeforeItAppends) {
  append_metrics(folder_.path("whole"), step_metrics(1));
  const auto line = read_file(folder_.path("whole"));
  const auto half = line.substr(0, line.size() / 2);
  for (const auto& before : {half, line + half, line}) {
    const auto path = folder_.write("cut", before);
    append_metrics(path, step_metrics(1));
    EXPECT_EQ(
        read_file(path), before.size() < line.size() ? line : line + line);
  }
  // The line is longer than the block that is searched for the last newline.
  const auto path = folder_.write("long", line + std::string(10'000, 'x'));
  append_metrics(path, step_metrics(1));
  EXPECT_EQ(read_file(path), line + line);
}

TEST_F(Metrics, ABrokenLineInTheMiddleIsAnErrorWithItsNumber) {
  for (const char* broken :
       {"{\"step\":2,", "[]", "{\"loss\":1}", "{\"step\":\"two\"}", "", "7"}) {
    const auto path = folder_.write(
        "metrics.jsonl",
        "{\"step\":1,\"loss\":1}\n" + std::string(broken) + "\n");
    EXPECT_THAT(
        error_text<DataError>([&] { read_metrics(path); }),
        HasSubstr(path + ":2: no line of metrics"))
        << broken;
  }
}

TEST_F(Metrics, TruncatingLeavesOutBrokenLinesAndKeepsTheFile) {
  const std::string first = "{\"step\":1,\"loss\":1}\n";
  const std::string second = "{\"step\":2,\"loss\":1}\n";
  const std::string third = "{\"step\":3,\"loss\":1}\n";
  const std::string one = first + "{\"st" + '\0' + "\n" + second + third;
  const std::string more = "\xff\x1b\n[]\n" + first + "\n" + second + "\x01";
  const auto keeps = [&](const std::string& before, int64_t step,
                         const std::string& after) {
    folder_.write("metrics.jsonl", before);
    const auto said = truncate_metrics(folder_.path("metrics.jsonl"), step);
    EXPECT_EQ(read_file(folder_.path("metrics.jsonl")), after);
    return said;
  };
  const std::string path = folder_.path("metrics.jsonl");
  EXPECT_EQ(keeps(first + second + third, 2, first + second), "");
  EXPECT_EQ(
      keeps(one, 2, first + second),
      path +
          ":2: no line of metrics; left out, and the file as it was is now "
          "damaged-metrics.jsonl");
  EXPECT_EQ(
      keeps(more, 2, first + second),
      path +
          ":1: no line of metrics, like 2 lines after it; left out, and the "
          "file as it was is now damaged-metrics.jsonl-2");
  EXPECT_EQ(read_file(folder_.path("damaged-metrics.jsonl")), one);
  EXPECT_EQ(read_file(folder_.path("damaged-metrics.jsonl-2")), more);
}

TEST_F(Metrics, RollbacksStayWhenStepsGo) {
  const std::string first = "{\"step\":1,\"loss\":1}\n";
  const std::string second = "{\"step\":2,\"loss\":1}\n";
  const Rollback one{
      .from_step = 7,
      .step = 1,
      .why = "a \"loss\"",
      .first = {0, 12},
      .end = {1, 3}};
  Rollback other = one;
  other.step = 9;
  const auto path = folder_.write(
      "metrics.jsonl", first + to_line(one) + second + to_line(other) + second);
  EXPECT_EQ(read_metrics(path).steps.size(), 3U);
  EXPECT_THAT(read_rollbacks(path), ElementsAre(one, other));
  EXPECT_EQ(truncate_metrics(path, 1), "");
  EXPECT_EQ(read_file(path), first + to_line(one) + to_line(other));
  append_rollback(path, one);
  EXPECT_EQ(truncate_metrics(path, 1), "");
  EXPECT_THAT(read_rollbacks(path), ElementsAre(one, other, one));
  EXPECT_TRUE(read_rollbacks(folder_.path("none")).empty());
  EXPECT_EQ(
      samples_text(one),
      "all from sample 12 of epoch 0 to before sample 3 of epoch 1");
}

TEST_F(Metrics, UnknownKeysAreIgnored) {
  const auto path = folder_.write(
      "metrics.jsonl", "{\"step\":1,\"loss\":1,\"perplexity\":{\"a\":[]}}\n");
  EXPECT_EQ(
      read_metrics(path).steps.at(0), (StepMetrics{.step = 1, .loss = 1}));
}

TEST_F(Metrics, AMissingFileIsNamed) {
  EXPECT_THAT(
      error_text<DataError>([] { read_metrics("/nowhere/metrics.jsonl"); }),
      HasSubstr("/nowhere/metrics.jsonl"));
}

TEST_F(Metrics, AFullDiskIsAnErrorWithPathReasonAndWhatWasKept) {
  MetricsWriter writer("/dev/full");
  EXPECT_EQ(
      error_text([&] { writer.append(step_metrics(1)); }),
      "[metrics] cannot write /dev/full: No space left on device; the 0 lines "
      "that this run wrote before are kept");
}

// A disk that is full after one and a half of three lines.
TEST_F(Metrics, OfLinesWrittenTogetherTheWholeOnesAreKept) {
  append_metrics(path_, step_metrics(1));
  const auto line = read_file(path_);
  MetricsWriter writer(path_, [] { return int64_t{0}; });
  writer.append(step_metrics(1));
  for (int i = 0; i < 3; ++i) writer.append(step_metrics(1));
  ASSERT_EQ(read_file(path_), line + line);

  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = line.size() * 7 / 2;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto said = error_text([&] { writer.flush(); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_EQ(
      said, "[metrics] cannot write " + path_ +
                ": File too large; the 2 lines "
                "that this run wrote before are kept");
  EXPECT_EQ(read_file(path_), line + line + line);
  // There is room again.
  writer.flush();
  EXPECT_EQ(read_file(path_), line + line + line + line + line);
}

StepMetrics quick_step(double loss, double seconds, double samples_per_second) {
  StepMetrics step;
  step.loss = loss;
  step.step_seconds = seconds;
  step.samples_per_second = samples_per_second;
  return step;
}

TEST(MedianOfSteps, OfAnEvenNumberIsBetweenTheTwoInTheMiddle) {
  std::vector<StepMetrics> steps(4);
  for (size_t i = 0; i < 4; ++i) {
    steps[i].step_seconds = std::array{8.0, 1.0, 4.0, 2.0}[i];
  }
  EXPECT_EQ(median_of(steps, &StepMetrics::step_seconds), 3.0);
  steps.pop_back();
  EXPECT_EQ(median_of(steps, &StepMetrics::step_seconds), 4.0);
  EXPECT_EQ(median_of({}, &StepMetrics::step_seconds), std::nullopt);
}

TEST(RecentSteps, ARateIsSamplesOverTheTimeOfAllSteps) {
  RecentSteps recent(3);
  EXPECT_EQ(recent.samples_per_second(), 0);
  recent.add(quick_step(9, 1, 1));  // has left when the fourth came
  recent.add(quick_step(1, 0.001, 16000));
  recent.add(quick_step(2, 0.001, 16000));
  recent.add(quick_step(3, 0.030, 16 / 0.030));
  EXPECT_NEAR(recent.samples_per_second(), 48 / 0.032, 1e-9);
  EXPECT_NEAR(recent.loss(), 2, 1e-12);
}

// A sum from which a huge loss was taken away again has lost its digits.
TEST(RecentSteps, AHugeLossIsForgotten) {
  RecentSteps recent(2);
  for (const double loss : {1e30, 1.0, 2.0, 4.0}) {
    recent.add(quick_step(loss, 1, 1));
  }
  EXPECT_EQ(recent.loss(), 3);
}

TEST(RecentSteps, ALossThatIsNotFiniteIsLeftOut) {
  RecentSteps recent(3);
  for (const double loss : {4.0, double{NAN}, 2.0})
    recent.add(quick_step(loss, 1, 1));
  EXPECT_EQ(recent.loss(), 3);
  recent.add(quick_step(INFINITY, 1, 1));
  EXPECT_EQ(recent.loss(), 2);
}

}  // namespace echelon::timeline::metrics_test
