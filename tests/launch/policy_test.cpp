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

Policy make() {
  return Policy(milliseconds(5000), milliseconds(1000));
}

TEST(Policy, RanksThatSucceedCauseNoOrders) {
  Policy policy = make();
  EXPECT_EQ(policy.on_rank_end(false, false, at(1)), Orders{});
  EXPECT_FALSE(policy.deadline());
  EXPECT_FALSE(policy.stopping());
}

TEST(Policy, FailureTerminatesThenKills) {
  Policy policy = make();
  EXPECT_EQ(policy.on_rank_end(true, false, at(10)), Orders{SIGTERM});
  EXPECT_TRUE(policy.stopping());
  EXPECT_EQ(policy.deadline(), at(5010));
  EXPECT_EQ(policy.on_time(at(5009)), Orders{});
  EXPECT_EQ(policy.on_time(at(5010)), Orders{SIGKILL});
  EXPECT_EQ(policy.on_time(at(9999)), Orders{});
  EXPECT_FALSE(policy.deadline());
}

TEST(Policy, SecondFailureOrdersNothingMore) {
  Policy policy = make();
  policy.on_rank_end(true, false, at(10));
  EXPECT_EQ(policy.on_rank_end(true, false, at(20)), Orders{});
  EXPECT_EQ(policy.deadline(), at(5010));
}

TEST(Policy, AConsequenceWaitsForItsCause) {
  Policy policy = make();
  EXPECT_EQ(policy.on_rank_end(true, true, at(10)), Orders{});
  EXPECT_FALSE(policy.stopping());
  EXPECT_EQ(policy.on_rank_end(true, false, at(50)), Orders{SIGTERM});
  EXPECT_EQ(policy.deadline(), at(5050));
}

TEST(Policy, AConsequenceWithoutACauseStopsTheJobToo) {
  Policy policy = make();
  policy.on_rank_end(true, true, at(10));
  EXPECT_EQ(policy.on_rank_end(true, true, at(500)), Orders{});
  EXPECT_EQ(policy.on_time(at(1010)), Orders{SIGTERM});
  EXPECT_EQ(policy.on_time(at(6010)), Orders{SIGKILL});
}

TEST(Policy, TheFirstCtrlCIsForwardedAndTheSecondKills) {
  Policy policy = make();
  EXPECT_EQ(policy.on_stop_signal(SIGINT), Orders{SIGINT});
  EXPECT_EQ(policy.stopped_by(), SIGINT);
  EXPECT_FALSE(policy.deadline());  // a checkpoint may take its time
  EXPECT_EQ(policy.on_rank_end(false, false, at(10)), Orders{});
  EXPECT_FALSE(policy.deadline());
  EXPECT_EQ(policy.on_stop_signal(SIGINT), Orders{SIGKILL});
  EXPECT_EQ(policy.on_stop_signal(SIGINT), Orders{});
}

TEST(Policy, AfterCtrlCAFailedRankLimitsTheWait) {
  Policy policy = make();
  policy.on_stop_signal(SIGINT);
  EXPECT_EQ(policy.on_rank_end(true, false, at(100)), Orders{});
  EXPECT_EQ(policy.deadline(), at(5100));
  EXPECT_EQ(policy.on_time(at(5100)), Orders{SIGKILL});
}

TEST(Policy, AClosingTerminalDoesNotKill) {
  Policy policy = make();
  EXPECT_EQ(policy.on_stop_signal(SIGHUP), Orders{SIGHUP});
  EXPECT_EQ(policy.on_stop_signal(SIGHUP), Orders{});
  EXPECT_EQ(policy.on_stop_signal(SIGTERM), Orders{SIGKILL});
}

TEST(Policy, CtrlCWhileStoppingKills) {
  Policy policy = make();
  policy.on_rank_end(true, false, at(10));
  EXPECT_EQ(policy.on_stop_signal(SIGINT), Orders{SIGKILL});
  EXPECT_EQ(policy.stopped_by(), 0);
}

TEST(Policy, FailureOnAnotherHost) {
  Policy policy = make();
  EXPECT_EQ(policy.on_remote_failure(at(10)), Orders{SIGTERM});
  EXPECT_EQ(policy.on_remote_failure(at(20)), Orders{});
  EXPECT_EQ(policy.deadline(), at(5010));
}

TEST(Policy, FailureOnAnotherHostAfterCtrlCLimitsTheWait) {
  Policy policy = make();
  policy.on_stop_signal(SIGINT);
  EXPECT_EQ(policy.on_remote_failure(at(10)), Orders{});
  EXPECT_EQ(policy.on_time(at(5010)), Orders{SIGKILL});
}

}  // namespace echelon::launch::policy_test
