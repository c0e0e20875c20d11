#include "echelon/launch/hang_watch.h"

#include <gmock/gmock.h>

namespace echelon::launch::hang_watch_test {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr milliseconds kLook = HangWatch::kLook;
constexpr milliseconds kLeast{3000};

// A job of two ranks, and a launcher that looks at it.
class HangWatchTest : public testing::Test {
 protected:
  // Looks for so long, while rank 0 makes progress each `every`; 0: never.
  std::optional<HangWatch::Hang>
  look(milliseconds time, milliseconds every, milliseconds passed = kLook) {
    for (milliseconds t{0}; t < time; t += kLook) {
      since_ += kLook;
      if (every.count() > 0 && since_ >= every) {
        ++ranks_[0].count;
        since_ = milliseconds(0);
      }
      if (auto hang = watch_.look(ranks_, passed)) return hang;
    }
    return std::nullopt;
  }

  std::vector<RankProgress> ranks_ = {
      {0, 5, RankPhase::step}, {0, 4, RankPhase::step}};
  milliseconds since_{0};
  HangWatch watch_{2, kLeast};
};

TEST_F(HangWatchTest, NamesTheRankThatTheOthersWaitFor) {
  EXPECT_FALSE(look(milliseconds(5000), kLook));
  EXPECT_FALSE(look(kLeast - kLook, milliseconds(0)));
  const auto hang = look(2 * kLook, milliseconds(0));
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, 1);
  EXPECT_EQ(
      hang->text,
      "hangs: no rank has made progress in its step for 3.0 s; the longest "
      "pause before was 0.1 s. It has issued 4 collectives, the other ranks up "
      "to 5");
  EXPECT_EQ(hang->collectives, 4);
}

TEST_F(HangWatchTest, LearnsHowLongPausesAre) {
  EXPECT_FALSE(look(milliseconds(20000), milliseconds(1000)));
  EXPECT_FALSE(look(milliseconds(9800), milliseconds(0)));
  EXPECT_TRUE(look(milliseconds(500), milliseconds(0)));
}

TEST_F(HangWatchTest, ForgetsALongPauseInTime) {
  EXPECT_FALSE(look(milliseconds(10000), milliseconds(1000)));
  EXPECT_FALSE(look(2000 * kLook, kLook));
  EXPECT_TRUE(look(kLeast + kLook, milliseconds(0)));
}

TEST_F(HangWatchTest, TheFirstStepsMayTakeAnyTime) {
  EXPECT_FALSE(look(3 * kLook, kLook));
  EXPECT_FALSE(look(milliseconds(100000), milliseconds(0)));
}

TEST_F(HangWatchTest, SlowFirstStepsCountUntilThereAreOthers) {
  EXPECT_FALSE(look(milliseconds(6000), milliseconds(2000)));
  EXPECT_FALSE(look(10 * kLook, kLook));
  EXPECT_FALSE(look(milliseconds(19000), milliseconds(0)));
  EXPECT_TRUE(look(milliseconds(2000), milliseconds(0)));
}

TEST_F(HangWatchTest, SlowFirstStepsAreSoonForgotten) {
  EXPECT_FALSE(look(milliseconds(6000), milliseconds(2000)));
  EXPECT_FALSE(look(100 * kLook, kLook));
  EXPECT_FALSE(look(kLeast - kLook, milliseconds(0)));
  EXPECT_TRUE(look(2 * kLook, milliseconds(0)));
}

TEST_F(HangWatchTest, ARankOutsideOfItsStepMayTakeAnyTime) {
  EXPECT_FALSE(look(milliseconds(5000), kLook));
  ranks_[1].phase = RankPhase::other;
  EXPECT_FALSE(look(milliseconds(100000), milliseconds(0)));
  ranks_[1].phase = RankPhase::step;
  EXPECT_FALSE(look(kLeast - kLook, milliseconds(0)));
  EXPECT_TRUE(look(kLook, milliseconds(0)));
}

// Batches of an evaluation may be slow beside steps, and the other way round.
TEST_F(HangWatchTest, APhaseHasPausesOfItsOwn) {
  EXPECT_FALSE(look(milliseconds(5000), kLook));
  for (auto& rank : ranks_) rank.phase = RankPhase::evaluation;
  EXPECT_FALSE(look(milliseconds(20000), milliseconds(1000)));
  EXPECT_FALSE(look(milliseconds(9800), milliseconds(0)));
  const auto hang = look(milliseconds(500), milliseconds(0));
  ASSERT_TRUE(hang);
  EXPECT_THAT(
      hang->text,
      HasSubstr("no rank has made progress in its evaluation for 10.0 s"));
  for (auto& rank : ranks_) rank.phase = RankPhase::step;
  EXPECT_FALSE(look(kLook, kLook));
  EXPECT_FALSE(look(kLeast - kLook, milliseconds(0)));
  EXPECT_TRUE(look(2 * kLook, milliseconds(0)));
}

TEST_F(HangWatchTest, ALauncherThatWasStoppedHasSeenNothing) {
  EXPECT_FALSE(look(milliseconds(5000), kLook));
  watch_.on_stopped(1, "SIGSTOP");
  EXPECT_FALSE(watch_.look(ranks_, milliseconds(3600'000)));
  watch_.on_continued(1);
  EXPECT_FALSE(watch_.look(ranks_, milliseconds(3600'000)));
}

TEST_F(HangWatchTest, ARankThatIsStoppedHangs) {
  watch_.on_stopped(1, "SIGSTOP");
  EXPECT_FALSE(look(HangWatch::kStopped - kLook, kLook));
  const auto hang = look(kLook, kLook);
  ASSERT_TRUE(hang);
  EXPECT_EQ(hang->rank, 1);
  EXPECT_EQ(hang->text, "was stopped by SIGSTOP and not continued for 3 s");
  EXPECT_EQ(hang->collectives, -1);
}

}  // namespace echelon::launch::hang_watch_test
