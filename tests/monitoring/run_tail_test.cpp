#include "echelon/monitoring/run_tail.h"

#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "echelon/timeline/metrics.h"
#include "echelon/timeline/rollback.h"
#include "tests/support/temp_folder.h"

namespace echelon::run_tail_test {

using monitoring::RunTail;
using timeline::MetricsWriter;
using timeline::StepMetrics;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A run that trains, goes back and trains again, and its tail.
class Tail : public testing::Test {
 protected:
  void open() { writer_ = std::make_unique<MetricsWriter>(path_); }
  void train(int64_t first, int64_t last) {
    if (!writer_) open();
    for (int64_t step = first; step <= last; ++step) {
      writer_->append(StepMetrics{
          .step = step,
          .loss = 1.0 / static_cast<double>(step) + 0.001 * life_,
          .samples_per_second = 100,
          .step_seconds = 0.5,
          .data_seconds = 0.125,
          .forward_seconds = 0.0625,
          .backward_seconds = 0.25,
          .update_seconds = 0.03125});
    }
    writer_->flush();
  }
  /// As a restart does: what came after `step` is gone.
  void go_back(int64_t step) {
    writer_.reset();
    EXPECT_EQ(timeline::truncate_metrics(path_, step), "");
    ++life_;
    open();
  }
  const std::filesystem::path folder() { return temp_.path(); }

  TempFolder temp_;
  std::filesystem::path path_ =
      std::filesystem::path(temp_.path()) / "metrics.jsonl";
  std::unique_ptr<MetricsWriter> writer_;
  int life_ = 0;
};

TEST_F(Tail, CountsWhatComes) {
  RunTail tail(folder());
  EXPECT_FALSE(tail.figures().step);
  EXPECT_EQ(tail.figures().steps, 0);
  train(1, 3);
  tail.poll();
  train(4, 10);
  tail.poll();
  tail.poll();
  const auto& figures = tail.figures();
  EXPECT_EQ(figures.step, 10);
  EXPECT_EQ(figures.steps, 10);
  EXPECT_EQ(figures.lost_steps, 0);
  EXPECT_DOUBLE_EQ(*figures.loss, 0.1);
  EXPECT_EQ(figures.samples_per_second, 100);
  EXPECT_FALSE(figures.tokens_per_second);
  EXPECT_DOUBLE_EQ(figures.kept_seconds, 5);
  EXPECT_THAT(
      figures.phase_seconds, testing::ElementsAre(1.25, 0.625, 2.5, 0, 0.3125));
  EXPECT_DOUBLE_EQ(figures.step_seconds.sum, 5);
}

TEST_F(Tail, WhatWasThereIsNoStepOfThisLauncher) {
  train(1, 1000);  // more than is read of them
  RunTail tail(folder());
  EXPECT_EQ(tail.figures().step, 1000);
  EXPECT_EQ(tail.figures().steps, 0);
  train(1001, 1002);
  tail.poll();
  EXPECT_EQ(tail.figures().steps, 2);
  EXPECT_DOUBLE_EQ(tail.figures().kept_seconds, 1);
}

TEST_F(Tail, StepsThatAreDoneAgainAreLost) {
  RunTail tail(folder());
  train(1, 20);
  tail.poll();
  go_back(15);
  train(16, 17);
  tail.poll();
  EXPECT_EQ(tail.figures().step, 17);
  EXPECT_EQ(tail.figures().steps, 22);
  EXPECT_EQ(tail.figures().lost_steps, 5);
  EXPECT_DOUBLE_EQ(tail.figures().kept_seconds, 8.5);
}

// The file is longer than before when it is looked at again.
TEST_F(Tail, StepsAreLostAlsoWhereTheFileHasGrown) {
  RunTail tail(folder());
  train(1, 20);
  tail.poll();
  go_back(18);
  train(19, 40);
  tail.poll();
  EXPECT_EQ(tail.figures().step, 40);
  EXPECT_EQ(tail.figures().steps, 42);
  EXPECT_EQ(tail.figures().lost_steps, 2);
}

// Steps of an earlier launcher that this one does again are its steps.
TEST_F(Tail, GoesBackBeforeItsBeginning) {
  train(1, 20);
  RunTail tail(folder());
  go_back(10);
  train(11, 13);
  tail.poll();
  EXPECT_EQ(tail.figures().steps, 3);
  EXPECT_EQ(tail.figures().lost_steps, 10);
  EXPECT_DOUBLE_EQ(tail.figures().kept_seconds, 1.5);
}

TEST_F(Tail, GoesBackFurtherThanItKnows) {
  RunTail tail(folder());
  train(1, 6000);
  tail.poll();
  EXPECT_EQ(tail.figures().steps, 6000);
  go_back(100);
  train(101, 105);
  tail.poll();
  EXPECT_EQ(tail.figures().step, 105);
  EXPECT_GE(tail.figures().lost_steps, 4096);
  EXPECT_GE(tail.figures().kept_seconds, 0);
}

TEST_F(Tail, AnotherRunInItsPlace) {
  RunTail tail(folder());
  train(1, 20);
  tail.poll();
  go_back(0);
  train(1, 5);
  tail.poll();
  EXPECT_EQ(tail.figures().step, 5);
  EXPECT_EQ(tail.figures().steps, 25);
  EXPECT_EQ(tail.figures().lost_steps, 20);
}

TEST_F(Tail, OtherLinesAndHalfLinesAreNoSteps) {
  RunTail tail(folder());
  train(1, 2);
  writer_->append(timeline::EvaluationMetrics{.step = 2, .samples = 10});
  writer_.reset();
  timeline::append_rollback(path_, {.from_step = 2, .step = 1, .why = "x"});
  std::ofstream(path_, std::ios::app) << "no json\n{\"step\":3,\"loss\":";
  tail.poll();
  EXPECT_EQ(tail.figures().steps, 2);
  std::ofstream(path_, std::ios::app)
      << "null,\"loss_is\":\"nan\",\"step_seconds\":1}\n";
  tail.poll();
  EXPECT_EQ(tail.figures().steps, 3);
  EXPECT_TRUE(std::isnan(*tail.figures().loss));
}

TEST_F(Tail, FindsTheNewestCheckpoint) {
  namespace fs = std::filesystem;
  RunTail tail(folder());
  EXPECT_FALSE(tail.figures().checkpoint);
  const auto before =
      std::chrono::system_clock::now() - std::chrono::seconds(1);
  const fs::path place = folder() / "checkpoints/step-00000010";
  fs::create_directories(place);
  std::ofstream(place / "manifest.json") << "{}";
  tail.poll();
  ASSERT_TRUE(tail.figures().checkpoint);
  EXPECT_GE(*tail.figures().checkpoint, before);
  if (tail.figures().checkpoint_seconds) {
    EXPECT_GE(*tail.figures().checkpoint_seconds, 0);
  }
}

}  // namespace echelon::run_tail_test
