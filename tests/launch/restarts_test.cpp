#include "echelon/launch/restarts.h"

#include <gtest/gtest.h>

#include "echelon/error.h"

namespace echelon::launch::restarts_test {

using Verdict = Restarts::Verdict;

Outcome failed(int exit_code, int stopped_by = 0) {
  return {exit_code, stopped_by, Cause{.rank = 1, .exit_code = exit_code}};
}

TEST(Restarts, AreAsManyAsAllowed) {
  Restarts restarts(2);
  EXPECT_EQ(restarts.on_end(failed(137), std::nullopt), Verdict::restart);
  EXPECT_TRUE(restarts.left());
  EXPECT_EQ(restarts.on_end(failed(1), std::nullopt), Verdict::restart);
  EXPECT_EQ(restarts.count(), 2);
  EXPECT_FALSE(restarts.left());
  EXPECT_EQ(restarts.on_end(failed(137), std::nullopt), Verdict::end);
  EXPECT_EQ(Restarts(0).on_end(failed(137), std::nullopt), Verdict::end);
}

TEST(Restarts, DoNotMendWhatAUserMust) {
  for (const ExitCode code :
       {ExitCode::configuration, ExitCode::data, ExitCode::numeric,
        ExitCode::preempted, ExitCode::do_not_requeue, ExitCode::interrupted}) {
    Restarts restarts(9);
    EXPECT_EQ(
        restarts.on_end(failed(static_cast<int>(code)), std::nullopt),
        Verdict::end);
  }
}

TEST(Restarts, FollowNoEndThatWasAskedFor) {
  Restarts restarts(9);
  EXPECT_EQ(restarts.on_end(Outcome{}, std::nullopt), Verdict::end);
  EXPECT_EQ(restarts.on_end(failed(137, 15), std::nullopt), Verdict::end);
  // The launcher's own error: the program cannot be executed.
  EXPECT_EQ(
      restarts.on_end({1, 0, Cause{.rank = -1}}, std::nullopt), Verdict::end);
}

TEST(Restarts, EndWhenThreeInARowBringNoNewStep) {
  Restarts restarts(99);
  for (const int64_t step : {10, 10, 10, 20, 20, 20}) {
    EXPECT_EQ(restarts.on_end(failed(137), step), Verdict::restart) << step;
  }
  EXPECT_EQ(restarts.on_end(failed(137), 20), Verdict::stuck);
}

TEST(Restarts, OfWhichTheLastBringNoNewStepAreNotQueuedAgain) {
  Restarts restarts(3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(restarts.on_end(failed(137), 0), Verdict::restart);
  }
  EXPECT_EQ(restarts.on_end(failed(137), 0), Verdict::stuck);
}

}  // namespace echelon::launch::restarts_test
