#include "echelon/monitoring/job_board.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>

namespace echelon::job_board_test {

using monitoring::Durations;
using monitoring::JobBoard;
using monitoring::RestartReason;

uint64_t number_of(const Durations& durations) {
  return std::accumulate(
      durations.numbers.begin(), durations.numbers.end(), uint64_t{0});
}

TEST(JobBoard, AnotherProcessReadsWhatIsWritten) {
  JobBoard board(8);
  const pid_t reader = fork();
  if (reader == 0) {
    for (;;) {
      const auto facts = board.read();
      if (facts.generation == 3 && facts.ranks.size() == 2 &&
          facts.ranks[1].number == 5 && facts.ranks[1].up &&
          facts.ranks[1].pid == 77) {
        _exit(0);
      }
      usleep(1000);
    }
  }
  board.begin(
      {.number = 3,
       .first_rank = 4,
       .num_ranks = 2,
       .world_size = 6,
       .num_hosts = 2});
  board.rank_started(1, 77);
  int status = -1;
  EXPECT_EQ(waitpid(reader, &status, 0), reader);
  EXPECT_EQ(status, 0);
}

TEST(JobBoard, RanksOfAGenerationAreThoseThatStarted) {
  JobBoard board(4);
  EXPECT_TRUE(board.read().ranks.empty());
  board.begin({.num_ranks = 2, .world_size = 2});
  board.rank_started(0, 10);
  board.rank_started(1, 11);
  board.rank_ended(0);
  board.set_progress({{.count = 1}, {.count = 7, .collectives = 3}});
  const auto ranks = board.read().ranks;
  ASSERT_EQ(ranks.size(), 2U);
  EXPECT_FALSE(ranks[0].up);
  EXPECT_TRUE(ranks[1].up);
  EXPECT_EQ(ranks[1].progress.count, 7U);
  EXPECT_EQ(ranks[1].progress.collectives, 3U);
  board.begin({.number = 1, .num_ranks = 3, .world_size = 3});
  EXPECT_EQ(board.read().ranks.size(), 3U);
  for (const auto& rank : board.read().ranks) {
    EXPECT_FALSE(rank.up);
    EXPECT_EQ(rank.progress.count, 0U);
  }
}

TEST(JobBoard, MoreRanksThanItHasAreLeftOut) {
  JobBoard board(2);
  board.begin({.num_ranks = 5, .world_size = 5});
  board.rank_started(4, 10);
  board.set_progress({{}, {}, {}, {}, {.count = 3}});
  board.rank_ended(4);
  EXPECT_EQ(board.read().ranks.size(), 2U);
}

// Each process counts from 0.
TEST(JobBoard, TimesOfTheFirstRankAddUpOverRestarts) {
  JobBoard board(2);
  board.begin({.num_ranks = 2, .world_size = 2});
  board.set_peak_seconds(0.5);
  EXPECT_EQ(board.read().peak_seconds, 0.5);
  board.set_progress({{.checkpoint_ns = 1000000000}, {.checkpoint_ns = 9}});
  board.set_progress({{.checkpoint_ns = 2000000000}, {.checkpoint_ns = 9}});
  EXPECT_EQ(board.read().checkpoint_seconds, 2);
  board.begin({.number = 1, .num_ranks = 2, .world_size = 2});
  EXPECT_EQ(board.read().peak_seconds, 0) << "another layout has another";
  board.set_progress({{.checkpoint_ns = 250000000}, {}});
  EXPECT_EQ(board.read().checkpoint_seconds, 2.25);
}

TEST(JobBoard, RestartsHaveReasons) {
  JobBoard board(1);
  board.count_restart(RestartReason::rank_killed);
  board.count_restart(RestartReason::rank_killed);
  board.count_restart(RestartReason::resized);
  const auto restarts = board.read().restarts;
  EXPECT_EQ(restarts[static_cast<size_t>(RestartReason::rank_killed)], 2U);
  EXPECT_EQ(restarts[static_cast<size_t>(RestartReason::resized)], 1U);
  EXPECT_EQ(std::accumulate(restarts.begin(), restarts.end(), 0U), 3U);
}

// The ranks that end have made progress before, which is none after the fault.
TEST(JobBoard, RecoveryEndsWithProgressOfTheNextRanks) {
  JobBoard board(1);
  board.begin({.num_ranks = 1, .world_size = 1});
  board.set_progress({{.count = 5}});
  EXPECT_EQ(number_of(board.read().recoveries), 0U);
  board.stop_training();
  board.stop_training();
  board.set_progress({{.count = 5}});
  EXPECT_EQ(number_of(board.read().recoveries), 0U);
  board.begin({.number = 1, .num_ranks = 1, .world_size = 1});
  board.set_progress({{.count = 0}});
  EXPECT_EQ(number_of(board.read().recoveries), 0U);
  board.set_progress({{.count = 1}});
  board.set_progress({{.count = 2}});
  EXPECT_EQ(number_of(board.read().recoveries), 1U);
  EXPECT_GT(board.read().recoveries.sum, 0);
}

TEST(JobBoard, RanksMayGetOtherGpus) {
  JobBoard board(4);
  board.begin({.num_ranks = 1, .world_size = 1});
  EXPECT_EQ(board.read().visible_gpus, std::nullopt);
  const std::string all = "GPU-a,GPU-b";
  board.begin({.num_ranks = 2, .world_size = 2, .visible_gpus = all});
  EXPECT_EQ(board.read().visible_gpus, all);
  board.begin({.num_ranks = 2, .world_size = 2, .visible_gpus = ""});
  EXPECT_EQ(board.read().visible_gpus, "");
  board.begin({.num_ranks = 1, .world_size = 1});
  EXPECT_EQ(board.read().visible_gpus, std::nullopt);
}

TEST(JobBoard, KnowsTheLastFailureAndTheEnd) {
  JobBoard board(1);
  EXPECT_EQ(board.read().failure, "");
  EXPECT_EQ(board.read().exit_code, std::nullopt);
  board.note_failure("rank 0: first");
  board.note_failure("rank 1: second, and longer");
  EXPECT_EQ(board.read().failure, "rank 1: second, and longer");
  board.note_failure(std::string(5000, 'x'));
  EXPECT_GT(board.read().failure.size(), 100U);
  EXPECT_LT(board.read().failure.size(), 1000U);
  board.end(0);
  EXPECT_EQ(board.read().exit_code, 0);
}

TEST(Durations, AreCountedUpToTheirBound) {
  Durations durations({1, 2});
  for (const double seconds : {0.5, 1.0, 1.5, 2.0, 9.0}) durations.add(seconds);
  EXPECT_THAT(durations.numbers, testing::ElementsAre(2, 2, 1));
  EXPECT_DOUBLE_EQ(durations.sum, 14);
}

}  // namespace echelon::job_board_test
