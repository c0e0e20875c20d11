// Each rule by an example. decide_properties_test.cpp has what holds always.
#include "echelon/pool/decide.h"

#include <gmock/gmock.h>

#include "echelon/pool/fair_share.h"
#include "tests/pool/pool_cases.h"

namespace echelon::pool::decide_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// language may have 5 for sure, vision 3.
State two_projects(int devices = 8) {
  State state = make_pool(devices);
  state.projects = {
      {.name = "language", .guaranteed = 5},
      {.name = "vision", .guaranteed = 3}};
  return state;
}

TEST(FairShare, GuaranteesComeFirstThenWeights) {
  State state = make_pool(16);
  state.projects = {
      {.name = "a", .guaranteed = 6, .weight = 1},
      {.name = "b", .guaranteed = 2, .weight = 3},
      {.name = "c", .guaranteed = 0, .weight = 0}};
  // 8 are left: 2 and 6.
  EXPECT_THAT(fair_shares(state, {16, 16, 16}), ElementsAre(8, 8, 0));
  // Who asks for less leaves it to the others, the guarantee too.
  EXPECT_THAT(fair_shares(state, {1, 16, 16}), ElementsAre(1, 15, 0));
  EXPECT_THAT(fair_shares(state, {16, 4, 0}), ElementsAre(12, 4, 0));
}

TEST(FairShare, ChildrenDivideTheirParentsShare) {
  State state = make_pool(12);
  state.projects = {
      {.name = "research", .guaranteed = 6, .limit = 8},
      {.name = "vision", .parent = 0, .guaranteed = 4},
      {.name = "speech", .parent = 0, .guaranteed = 1},
      {.name = "product", .guaranteed = 2}};
  EXPECT_THAT(fair_shares(state, {0, 12, 12, 1}), ElementsAre(8, 6, 2, 1));
  EXPECT_THAT(fair_shares(state, {0, 12, 12, 12})[0], 8);
  EXPECT_THAT(fair_shares(state, {0, 2, 12, 12})[2], 6);
}

TEST(FairShare, UsageLowersAWeight) {
  State state = make_pool(10);
  state.projects = {{.name = "a", .usage = 3600}, {.name = "b", .usage = 0}};
  EXPECT_THAT(fair_shares(state, {10, 10}), ElementsAre(5, 5));
  state.rules.usage_factor = 0.5;
  EXPECT_THAT(fair_shares(state, {10, 10}), ElementsAre(2, 8));
  // Usage takes nothing of a guarantee.
  state.projects[0].guaranteed = 4;
  EXPECT_THAT(fair_shares(state, {10, 10}), ElementsAre(5, 5));
}

TEST(Decide, AnElasticJobTakesWhatIsIdle) {
  State state = two_projects();
  submit(state, 0, 2, 8, Kept::none);
  const Decision decision = settle(state);
  ASSERT_EQ(decision.orders.size(), 1u);
  EXPECT_EQ(decision.orders[0].kind, Order::Kind::start);
  EXPECT_THAT(counts_of(state), ElementsAre(8));
}

// The story of the pool: language has borrowed all, vision wants its own.
TEST(Decide, AGuaranteeIsTakenBackByShrinking) {
  State state = two_projects();
  submit(state, 0, 2, 8, Kept::none);
  settle(state);
  submit(state, 1, 3, 3, Kept::all);
  const Decision decision = settle(state);
  ASSERT_EQ(decision.orders.size(), 2u);
  EXPECT_EQ(decision.orders[0].kind, Order::Kind::shrink);
  EXPECT_EQ(decision.orders[1].kind, Order::Kind::start);
  EXPECT_THAT(counts_of(state), ElementsAre(5, 3));
}

TEST(Decide, AJobThatCannotShrinkIsStopped) {
  State state = two_projects();
  submit(state, 0, 8, 8, Kept::none);
  settle(state);
  submit(state, 1, 3, 3, Kept::all);
  Decision decision = settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(0, 3));
  EXPECT_THAT(
      why(state, decision, 0),
      "it needs 8 devices; 5 are idle, and with it language would hold 8, "
      "above its fair share of 5, so that it takes none back");
  state.jobs.pop_back();
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(8));
}

TEST(Decide, ShrinksBeforeItStops) {
  State state = two_projects();
  submit(state, 0, 4, 4, Kept::none);
  submit(state, 0, 1, 4, Kept::none);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(4, 4));
  submit(state, 1, 3, 3, Kept::all);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(4, 1, 3));
}

TEST(Decide, ASizeThatTheJobRefusedIsLeftOut) {
  State state = two_projects();
  submit(state, 0, 2, 8, Kept::none);
  settle(state);
  state.jobs[0].refused = {5, 6, 7};
  submit(state, 1, 3, 3, Kept::all);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(4, 3));
}

TEST(Decide, OnlyPreemptibleWorkBorrows) {
  State state = two_projects();
  submit(state, 1, 3, 3, Kept::all);
  submit(state, 1, 1, 1, Kept::all);
  submit(state, 1, 1, 1, Kept::none);
  const Decision decision = settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(3, 0, 1));
  EXPECT_THAT(
      why(state, decision, 1),
      "it may not be pre-empted, so it needs 1 of the guarantee of vision, and "
      "3 of its 3 cannot be taken from others; --preemptible may borrow");
}

TEST(Decide, ALeastThatIsKeptIsWithinTheGuarantee) {
  State state = two_projects();
  submit(state, 1, 2, 8, Kept::least);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(8));
  submit(state, 1, 2, 2, Kept::least);
  submit(state, 0, 5, 5, Kept::all);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(3, 0, 5));
  // A job that needs the guarantee takes what its own project borrowed.
  submit(state, 1, 1, 1, Kept::all);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(3, 0, 5, 0));
}

TEST(Decide, ALimitHoldsForTheProjectAndItsParent) {
  State state = make_pool(8);
  state.projects = {
      {.name = "research", .limit = 5},
      {.name = "vision", .parent = 0, .limit = 4},
      {.name = "speech", .parent = 0}};
  submit(state, 1, 1, 8, Kept::none);
  submit(state, 2, 1, 8, Kept::none);
  submit(state, 2, 2, 2, Kept::none);
  const Decision decision = settle(state);
  EXPECT_EQ(decision.held[0], 5);
  EXPECT_LE(decision.held[1], 4);
  EXPECT_EQ(count_of(state, 2), 2);
  state = make_pool(8);
  state.projects = {{.name = "vision", .limit = 4}};
  submit(state, 0, 3, 3, Kept::none);
  submit(state, 0, 2, 2, Kept::none);
  const Decision tight = settle(state);
  EXPECT_THAT(
      why(state, tight, 1),
      "it needs 2 devices, and vision holds 3 of its limit of 4");
}

TEST(Decide, SiblingsGiveWhatTheirParentsLimitKeeps) {
  State state = make_pool(8);
  state.projects = {
      {.name = "research", .limit = 4},
      {.name = "vision", .parent = 0, .guaranteed = 2},
      {.name = "speech", .parent = 0, .guaranteed = 2}};
  submit(state, 1, 4, 4, Kept::none);
  settle(state);
  submit(state, 2, 2, 2, Kept::all);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(0, 2));
}

TEST(Decide, PrioritiesCountInsideAProject) {
  State state = two_projects();
  submit(state, 0, 8, 8, Kept::none);
  settle(state);
  submit(state, 0, 8, 8, Kept::none, 1);
  submit(state, 0, 8, 8, Kept::none, 2);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(0, 0, 8));
  // Another project's priority stops nothing.
  submit(state, 1, 4, 4, Kept::none, 9);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(0, 0, 8, 0));
}

TEST(Decide, TheMostSaturatedProjectGivesFirst) {
  State state = make_pool(12);
  state.projects = {
      {.name = "a", .guaranteed = 4},
      {.name = "b", .guaranteed = 4},
      {.name = "c", .guaranteed = 4}};
  submit(state, 0, 1, 1, Kept::none);
  for (int i = 0; i < 6; ++i) submit(state, 1, 1, 1, Kept::none);
  for (int i = 0; i < 5; ++i) submit(state, 0, 1, 1, Kept::none);
  settle(state);
  // a and b have 6 each of a fair share of 6; c's claim makes that 4.
  submit(state, 2, 1, 1, Kept::all);
  const Decision decision = settle(state);
  EXPECT_EQ(decision.held[2], 1);
  EXPECT_EQ(decision.held[0] + decision.held[1], 11);
  state.jobs.push_back(state.jobs.back());
  state.jobs.back().id = 100;
  state.jobs.back().devices.clear();
  const Decision second = settle(state);
  EXPECT_THAT(second.held, ElementsAre(5, 5, 2));
}

TEST(Decide, AYoungJobIsNotStopped) {
  State state = two_projects();
  state.rules.least_seconds = 60;
  submit(state, 0, 8, 8, Kept::none);
  settle(state);
  submit(state, 1, 3, 3, Kept::all);
  const Decision decision = settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(8, 0));
  EXPECT_THAT(
      why(state, decision, 1),
      "it needs 3 devices; none is idle, and jobs that would make room run for "
      "less than 60 s yet");
  state.now += 60;
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(0, 3));
}

TEST(Decide, AGangGetsAllOrNothing) {
  State state = two_projects();
  submit(state, 0, 6, 6, Kept::none);
  submit(state, 0, 6, 6, Kept::none);
  submit(state, 0, 2, 2, Kept::none);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(6, 0, 2));
}

// Small jobs may pass a large one, but not for ever.
TEST(Decide, NobodyOvertakesAJobThatHasWaitedLong) {
  State state = two_projects();
  submit(state, 0, 4, 4, Kept::none);
  submit(state, 0, 4, 4, Kept::none);
  submit(state, 0, 5, 5, Kept::none);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(4, 4, 0));
  state.now += state.rules.patience_seconds + 1;
  state.jobs.erase(state.jobs.begin());
  submit(state, 0, 1, 1, Kept::none);
  submit(state, 1, 3, 3, Kept::all);
  const Decision decision = settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(4, 0, 0, 3));
  EXPECT_THAT(why(state, decision, 2), "job 3 of language is before it");
  state.jobs.erase(state.jobs.begin());
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(5, 0, 3));
}

// Others may borrow meanwhile, and give it back.
TEST(Decide, WhatAJobWaitsForIsLentToOthers) {
  State state = two_projects();
  submit(state, 0, 2, 2, Kept::none);
  submit(state, 0, 5, 5, Kept::none);
  submit(state, 1, 6, 6, Kept::none);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(2, 0, 6));
  state.now += state.rules.patience_seconds + 1;
  submit(state, 0, 1, 1, Kept::none);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(2, 0, 6, 0));
  state.jobs.erase(state.jobs.begin());
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(5, 0, 1));
}

// It would lose its devices again at once.
TEST(Decide, AJobAboveItsFairShareHoldsNobodyUp) {
  State state = two_projects();
  submit(state, 0, 6, 6, Kept::none);
  submit(state, 1, 3, 3, Kept::all);
  settle(state);
  state.now += state.rules.patience_seconds + 1;
  submit(state, 0, 1, 1, Kept::none);
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(0, 3, 1));
}

TEST(Decide, ADrainedDeviceIsLeft) {
  State state = two_projects(10);
  submit(state, 0, 2, 8, Kept::none);
  submit(state, 1, 3, 3, Kept::all);
  settle(state);
  const int device = state.jobs[0].devices[0];
  state.devices[static_cast<size_t>(device)].usable = false;
  settle(state);
  EXPECT_EQ(count_of(state, 0), 6);
  EXPECT_THAT(state.jobs[0].devices, testing::Not(testing::Contains(device)));
  // A job that cannot shrink starts elsewhere, once it has ended.
  const int other = state.jobs[1].devices[0];
  state.devices[static_cast<size_t>(other)].usable = false;
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(6, 0));
  settle(state);
  EXPECT_THAT(counts_of(state), ElementsAre(5, 3));
}

TEST(Decide, NothingStartsInADrainedPool) {
  State state = two_projects();
  state.starts = false;
  submit(state, 0, 1, 1, Kept::none);
  const Decision decision = settle(state);
  EXPECT_THAT(decision.orders, IsEmpty());
  EXPECT_THAT(why(state, decision, 0), HasSubstr("drained"));
}

TEST(Decide, NeighboursStayTogether) {
  State state = make_pool(16, 4);
  state.projects = {{.name = "a"}};
  submit(state, 0, 3, 3, Kept::none);
  submit(state, 0, 4, 4, Kept::none);
  submit(state, 0, 1, 1, Kept::none);
  submit(state, 0, 6, 6, Kept::none);
  settle(state);
  EXPECT_THAT(state.jobs[0].devices, ElementsAre(0, 1, 2));
  EXPECT_THAT(state.jobs[1].devices, ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(state.jobs[2].devices, ElementsAre(3));
  EXPECT_THAT(state.jobs[3].devices, ElementsAre(8, 9, 10, 11, 12, 13));
  // Shrinking, it keeps the group of which it has more.
  state.jobs.resize(4);
  state.jobs[3].least = 1;
  state.projects.push_back({.name = "b", .guaranteed = 5});
  submit(state, 1, 4, 4, Kept::all);
  settle(state);
  EXPECT_THAT(state.jobs[3].devices, ElementsAre(8, 9, 10, 11));
  EXPECT_THAT(state.jobs[4].devices, ElementsAre(12, 13, 14, 15));
}

}  // namespace echelon::pool::decide_test
