#include "echelon/launch/policy.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace echelon::launch::policy_test {

using std::chrono::milliseconds;
using Orders = Policy::Orders;

const TimePoint kStart{};

TimePoint at(int ms) {
  return kStart + milliseconds(ms);
}

class PolicyTest : public testing::Test {
 protected:
  Policy policy_{milliseconds(5000), milliseconds(1000)};
};

TEST_F(PolicyTest, RanksThatSucceedCauseNoOrders) {
  EXPECT_EQ(policy_.on_rank_end(false, false, at(1)), Orders{});
  EXPECT_FALSE(policy_.deadline());
  EXPECT_FALSE(policy_.stopping());
}

TEST_F(PolicyTest, FailureTerminatesThenKills) {
  EXPECT_EQ(policy_.on_rank_end(true, false, at(10)), Orders{SIGTERM});
  EXPECT_TRUE(policy_.stopping());
  EXPECT_EQ(policy_.deadline(), at(5010));
  EXPECT_EQ(policy_.on_time(at(5009)), Orders{});
  EXPECT_EQ(policy_.on_time(at(5010)), Orders{SIGKILL});
  EXPECT_EQ(policy_.on_time(at(9999)), Orders{});
  EXPECT_FALSE(policy_.deadline());
}

TEST_F(PolicyTest, SecondFailureOrdersNothingMore) {
  policy_.on_rank_end(true, false, at(10));
  EXPECT_EQ(policy_.on_rank_end(true, false, at(20)), Orders{});
  EXPECT_EQ(policy_.deadline(), at(5010));
}

TEST_F(PolicyTest, AConsequenceWaitsForItsCause) {
  EXPECT_EQ(policy_.on_rank_end(true, true, at(10)), Orders{});
  EXPECT_FALSE(policy_.stopping());
  EXPECT_EQ(policy_.on_rank_end(true, false, at(50)), Orders{SIGTERM});
  EXPECT_EQ(policy_.deadline(), at(5050));
}

TEST_F(PolicyTest, AConsequenceWithoutACauseStopsTheJobToo) {
  policy_.on_rank_end(true, true, at(10));
  EXPECT_EQ(policy_.on_rank_end(true, true, at(500)), Orders{});
  EXPECT_EQ(policy_.on_time(at(1010)), Orders{SIGTERM});
  EXPECT_EQ(policy_.on_time(at(6010)), Orders{SIGKILL});
}

TEST_F(PolicyTest, TheFirstCtrlCIsForwardedAndALaterOneKills) {
  EXPECT_EQ(policy_.on_stop_signal(SIGINT, at(5)), Orders{SIGINT});
  EXPECT_EQ(policy_.stopped_by(), SIGINT);
  EXPECT_FALSE(policy_.deadline());  // a checkpoint may take its time
  EXPECT_EQ(policy_.on_rank_end(false, false, at(10)), Orders{});
  EXPECT_FALSE(policy_.deadline());
  EXPECT_EQ(policy_.on_stop_signal(SIGINT, at(2005)), Orders{});
  EXPECT_EQ(policy_.on_stop_signal(SIGINT, at(2006)), Orders{SIGKILL});
  EXPECT_EQ(policy_.on_stop_signal(SIGINT, at(9000)), Orders{});
}

// A scheduler signals the launchers of all hosts, and each tells the others.
TEST_F(PolicyTest, OneStopThatReachesSeveralHostsIsOne) {
  EXPECT_EQ(policy_.on_stop_signal(SIGTERM, at(10)), Orders{SIGTERM});
  EXPECT_EQ(policy_.on_remote_stop(SIGTERM), Orders{});
  EXPECT_EQ(policy_.on_stop_signal(SIGTERM, at(20)), Orders{});
}

TEST_F(PolicyTest, AStopThatAnotherHostToldOfIsTheFirstOnlyOnce) {
  EXPECT_EQ(policy_.on_remote_stop(SIGTERM), Orders{SIGTERM});
  EXPECT_EQ(policy_.stopped_by(), SIGTERM);
  // This host's own signal comes late.
  EXPECT_EQ(policy_.on_stop_signal(SIGTERM, at(60000)), Orders{});
  EXPECT_EQ(policy_.on_remote_stop(SIGTERM), Orders{});
  EXPECT_EQ(policy_.on_stop_signal(SIGTERM, at(62001)), Orders{SIGKILL});
}

TEST_F(PolicyTest, AfterCtrlCAFailedRankLimitsTheWait) {
  policy_.on_stop_signal(SIGINT, at(0));
  EXPECT_EQ(policy_.on_rank_end(true, false, at(100)), Orders{});
  EXPECT_EQ(policy_.deadline(), at(5100));
  EXPECT_EQ(policy_.on_time(at(5100)), Orders{SIGKILL});
}

TEST_F(PolicyTest, AClosingTerminalDoesNotKill) {
  EXPECT_EQ(policy_.on_stop_signal(SIGHUP, at(0)), Orders{SIGHUP});
  EXPECT_EQ(policy_.on_stop_signal(SIGHUP, at(3000)), Orders{});
  EXPECT_EQ(policy_.on_stop_signal(SIGTERM, at(3001)), Orders{SIGKILL});
}

TEST_F(PolicyTest, CtrlCWhileStoppingKills) {
  policy_.on_rank_end(true, false, at(10));
  EXPECT_EQ(policy_.on_stop_signal(SIGINT, at(11)), Orders{SIGKILL});
  EXPECT_EQ(policy_.stopped_by(), 0);
}

TEST_F(PolicyTest, BeforeARestartTheOthersAreKilledAtOnce) {
  EXPECT_EQ(policy_.on_rank_end(true, false, at(10), true), Orders{SIGKILL});
}

TEST_F(PolicyTest, BeforeARestartAConsequenceWaitsForItsCause) {
  EXPECT_EQ(policy_.on_rank_end(true, true, at(10), true), Orders{});
  EXPECT_EQ(policy_.on_time(at(1010)), Orders{SIGKILL});
}

TEST_F(PolicyTest, FailureOnAnotherHost) {
  EXPECT_EQ(policy_.on_remote_failure(at(10)), Orders{SIGTERM});
  EXPECT_EQ(policy_.on_remote_failure(at(20)), Orders{});
  EXPECT_EQ(policy_.deadline(), at(5010));
}

TEST_F(PolicyTest, FailureOnAnotherHostAfterCtrlCLimitsTheWait) {
  policy_.on_stop_signal(SIGINT, at(0));
  EXPECT_EQ(policy_.on_remote_failure(at(10)), Orders{});
  EXPECT_EQ(policy_.on_time(at(5010)), Orders{SIGKILL});
}

}  // namespace echelon::launch::policy_test
