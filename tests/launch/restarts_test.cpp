#include "echelon/launch/restarts.h"

#include <gmock/gmock.h>

#include "echelon/error.h"

namespace echelon::launch::restarts_test {

using testing::HasSubstr;
using testing::StartsWith;
using Verdict = Restarts::Verdict;

Outcome failed(
    int exit_code, int stopped_by = 0,
    FailureKind kind = FailureKind::program) {
  return {
      exit_code, stopped_by,
      Cause{.rank = 1, .exit_code = exit_code, .kind = kind}};
}

Outcome killed() {
  return failed(137, 0, FailureKind::outside);
}

Outcome out_of_memory() {
  return failed(137, 0, FailureKind::memory);
}

TEST(Restarts, AreAsManyAsAllowed) {
  Restarts restarts(2);
  EXPECT_EQ(
      restarts.on_end(failed(139), std::nullopt).words,
      "1 of 2 (--max-restarts)");
  EXPECT_TRUE(restarts.left(FailureKind::program));
  const auto second = restarts.on_end(failed(1), std::nullopt);
  EXPECT_EQ(second.verdict, Verdict::restart);
  EXPECT_EQ(second.words, "2 of 2 (--max-restarts)");
  EXPECT_FALSE(restarts.left(FailureKind::program));
  EXPECT_EQ(restarts.on_end(failed(1), std::nullopt).verdict, Verdict::end);
  for (const auto& outcome : {failed(1), killed(), out_of_memory()}) {
    EXPECT_EQ(Restarts(0).on_end(outcome, 7).verdict, Verdict::end);
    EXPECT_FALSE(Restarts(0).left(outcome.cause->kind));
  }
}

TEST(Restarts, DoNotMendWhatAUserMust) {
  for (const ExitCode code :
       {ExitCode::configuration, ExitCode::data, ExitCode::numeric,
        ExitCode::preempted, ExitCode::do_not_requeue, ExitCode::interrupted}) {
    Restarts restarts(9);
    EXPECT_EQ(
        restarts.on_end(failed(static_cast<int>(code)), std::nullopt).verdict,
        Verdict::end);
  }
}

TEST(Restarts, FollowNoEndThatWasAskedFor) {
  Restarts restarts(9);
  EXPECT_EQ(restarts.on_end(Outcome{}, std::nullopt).verdict, Verdict::end);
  EXPECT_EQ(
      restarts.on_end(failed(137, 15), std::nullopt).verdict, Verdict::end);
  // The launcher's own error: the program cannot be executed.
  EXPECT_EQ(
      restarts.on_end({1, 0, Cause{.rank = -1}}, std::nullopt).verdict,
      Verdict::end);
}

TEST(Restarts, DoNotCountWhatIsKilledFromOutside) {
  Restarts restarts(1);
  for (int64_t step = 10; step < 30; ++step) {
    const auto decision = restarts.on_end(killed(), step);
    EXPECT_EQ(decision.verdict, Verdict::restart);
    EXPECT_EQ(decision.wait.count(), 0);
  }
  EXPECT_EQ(restarts.on_end(failed(1), 40).words, "1 of 1 (--max-restarts)");
  EXPECT_EQ(
      restarts.on_end(killed(), 50).words,
      "21 after a kill from outside, which --max-restarts does not count");
  EXPECT_EQ(restarts.on_end(failed(1), 60).verdict, Verdict::end);
  // A lost host.
  EXPECT_EQ(
      restarts
          .on_end({1, 0, Cause{.rank = -1, .kind = FailureKind::outside}}, 70)
          .verdict,
      Verdict::restart);
}

// Else such a job could start for ever.
TEST(Restarts, CountKillsWhereStepsAreNotKnown) {
  Restarts restarts(1);
  EXPECT_EQ(
      restarts.on_end(killed(), std::nullopt).words, "1 of 1 (--max-restarts)");
  EXPECT_EQ(restarts.on_end(killed(), std::nullopt).verdict, Verdict::end);
}

TEST(Restarts, FollowALackOfMemoryOnce) {
  Restarts restarts(9);
  EXPECT_TRUE(restarts.left(FailureKind::memory));
  EXPECT_EQ(
      restarts.on_end(out_of_memory(), 10).words,
      "1 of 1 after memory ran out");
  EXPECT_FALSE(restarts.left(FailureKind::memory));
  EXPECT_EQ(restarts.on_end(failed(1), 20).words, "1 of 9 (--max-restarts)");
  const auto again = restarts.on_end(out_of_memory(), 30);
  EXPECT_EQ(again.verdict, Verdict::end);
  EXPECT_THAT(again.words, HasSubstr("memory ran out before"));
}

TEST(Restarts, EndWhenThreeInARowBringNoNewStep) {
  Restarts restarts(99);
  std::vector<int64_t> waits;
  for (const int64_t step : {10, 10, 10, 20, 20, 20}) {
    const auto decision =
        restarts.on_end(step % 20 == 0 ? killed() : failed(137), step);
    EXPECT_EQ(decision.verdict, Verdict::restart) << step;
    waits.push_back(decision.wait.count());
  }
  EXPECT_THAT(waits, testing::ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_EQ(restarts.on_end(killed(), 20).verdict, Verdict::stuck);
}

TEST(Restarts, OfWhichTheLastBringNoNewStepAreNotQueuedAgain) {
  Restarts restarts(3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(restarts.on_end(failed(137), 0).verdict, Verdict::restart);
  }
  EXPECT_EQ(restarts.on_end(failed(137), 0).verdict, Verdict::stuck);
}

}  // namespace echelon::launch::restarts_test
