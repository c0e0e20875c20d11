// Every generator over a grid of sizes: valid, and its bubble and its memory as
// its header claims; small ones against lists written by hand.
#include <gmock/gmock.h>

#include <algorithm>

#include "echelon/schedule/check.h"
#include "echelon/schedule/memory.h"
#include "echelon/schedule/options.h"
#include "echelon/schedule/timing.h"
#include "echelon/text/format.h"
#include "tests/support/error_text.h"

namespace echelon::kinds_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

// "0F0 0B0" of one rank.
std::string text(const std::vector<Action>& list) {
  return join(list, " ", [](const Action& one) { return to_string(one); });
}

std::vector<std::string>
lists(const std::string& kind, int32_t ranks, int32_t microbatches, int32_t v) {
  std::vector<std::string> all;
  for (const auto& list :
       make_schedule({schedule_kind(kind), ranks, microbatches, v}).ranks) {
    all.push_back(text(list));
  }
  return all;
}

struct Case {
  ScheduleKind kind;
  int32_t p, m, v;
};

std::vector<Case> grid() {
  std::vector<Case> cases;
  for (const ScheduleKind kind : kScheduleKinds) {
    const bool any = takes_any_stages(kind);
    for (const int32_t p : {1, 2, 3, 4, 5, 8}) {
      for (int32_t m = 1; m <= 26; ++m) {
        if (kind == ScheduleKind::dualpipev && m < 2 * p) continue;
        for (int32_t v = 1; v <= (any ? 4 : 1); ++v) {
          cases.push_back({kind, p, m, any ? v : 0});
        }
      }
    }
  }
  return cases;
}

Schedule make(const Case& c) {
  return make_schedule({c.kind, c.p, c.m, c.v});
}

std::string name(const Case& c) {
  return format("{} p={} m={} v={}", to_string(c.kind), c.p, c.m, c.v);
}

TEST(ScheduleKinds, AllAreValid) {
  for (const auto& c : grid()) {
    const Schedule schedule = make(c);
    EXPECT_EQ(schedule.name, to_string(c.kind));
    EXPECT_EQ(schedule.num_ranks(), c.p);
    EXPECT_EQ(schedule.num_microbatches, c.m);
    const int32_t v = c.v == 0 ? stages_per_rank_of(c.kind) : c.v;
    EXPECT_EQ(schedule.num_stages(), c.p * v);
    EXPECT_NO_THROW(check(schedule)) << name(c);
  }
}

// The documented peak of stored activations, by rank.
std::vector<int32_t> claimed_peak(const Case& c) {
  const auto [kind, p, m, v] = c;
  std::vector<int32_t> peak;
  const int32_t rounds = std::max(1, m / p);
  const int32_t n = (m + rounds - 1) / rounds;
  for (int32_t r = 0; r < p; ++r) {
    if (kind == ScheduleKind::gpipe) peak.push_back(m);
    if (kind == ScheduleKind::breadth_first) peak.push_back(v * m);
    if (kind == ScheduleKind::one_f_one_b) peak.push_back(std::min(m, p - r));
    if (kind == ScheduleKind::interleaved) {
      const int32_t warmup = v == 1 ? p - 1 - r : (v - 1) * n + 2 * (p - 1 - r);
      peak.push_back(std::min(v * m, warmup + 1));
    }
    if (kind == ScheduleKind::zb_h1) peak.push_back(std::min(m, p));
    if (kind == ScheduleKind::zb_h2) peak.push_back(std::min(m, 2 * p - 1));
    if (kind == ScheduleKind::zb_v) peak.push_back(2 * p);
    if (kind == ScheduleKind::dualpipev) peak.push_back(2 * p + 1);
  }
  return peak;
}

TEST(ScheduleKinds, StoreWhatTheyClaim) {
  for (const auto& c : grid()) {
    const auto peak = stored_activations(make(c));
    if (c.kind == ScheduleKind::zb_v && c.m < 2 * c.p - 1) {
      EXPECT_THAT(peak.ranks, Each(testing::Le(2 * c.p))) << name(c);
    } else {
      EXPECT_EQ(peak.ranks, claimed_peak(c)) << name(c);
    }
    if (c.kind == ScheduleKind::gpipe ||
        c.kind == ScheduleKind::breadth_first) {
      EXPECT_THAT(peak.stages, Each(c.m)) << name(c);
    }
  }
}

// Idle time of each rank over the makespan, when F = I = W = 1 and B = 2.
double claimed_bubble(const Case& c) {
  const double p = c.p, m = c.m, v = c.v;
  if (c.kind == ScheduleKind::gpipe || c.kind == ScheduleKind::one_f_one_b)
    return (p - 1) / (m + p - 1);
  if (c.kind == ScheduleKind::breadth_first ||
      c.kind == ScheduleKind::interleaved) {
    return 1 - v * m / ((v - 1) * std::max(m, p) + m + p - 1);
  }
  if (c.kind == ScheduleKind::zb_h1 || c.kind == ScheduleKind::zb_h2) {
    return (p - 1) / (3 * m + p - 1);
  }
  return (p - 1) / (6 * m + p - 1);  // zb-v, dualpipev
}

// The number of microbatches from which the formula holds.
int32_t enough(const Case& c) {
  if (c.kind == ScheduleKind::zb_h1) return c.p;
  if (c.kind == ScheduleKind::zb_h2 || c.kind == ScheduleKind::zb_v)
    return 2 * c.p - 1;
  return 1;
}

TEST(ScheduleKinds, HaveTheBubbleThatTheyClaim) {
  for (const auto& c : grid()) {
    const Timing timing = time_schedule(make(c));
    if (c.m < enough(c)) continue;
    EXPECT_NEAR(timing.bubble, claimed_bubble(c), 1e-12) << name(c);
    for (int32_t rank = 0; rank < c.p; ++rank) {
      EXPECT_NEAR(timing.rank_bubble(rank), timing.bubble, 1e-12) << name(c);
    }
    const bool none = c.kind == ScheduleKind::zb_h2 ||
                      c.kind == ScheduleKind::zb_v || c.p == 1;
    EXPECT_NEAR(timing.span_bubble, none ? 0 : timing.bubble, 1e-12) << name(c);
  }
}

TEST(ScheduleKinds, ZeroBubbleFollowsItsPapersFormulaForOtherCosts) {
  struct Costs {
    double f, i, w;
  };
  for (const auto& [f, i, w] : std::vector<Costs>{
           {2, 2, 1}, {1, 2, 1}, {2, 1, 1}, {1, 1.25, 0.75}, {4, 3, 0.5}}) {
    for (const int32_t p : {1, 2, 4, 7}) {
      for (const int32_t m : {2 * p - 1, 2 * p, 5 * p + 1}) {
        for (const int32_t late : {1, 2}) {
          const auto schedule = make_schedule(
              {late == 1 ? ScheduleKind::zb_h1 : ScheduleKind::zb_h2, p, m, 0});
          const std::vector<StageCost> costs(
              static_cast<size_t>(p),
              {.forward = f, .backward_input = i, .backward_weight = w});
          const auto timing = time_schedule(schedule, costs);
          const double work = m * (f + i + w);
          const double bubble = std::max(0.0, (p - 1) * (f + i - late * w));
          EXPECT_NEAR(timing.span_bubble, bubble / (work + bubble), 1e-12)
              << schedule.name << " p=" << p << " m=" << m << " F=" << f
              << " I=" << i << " W=" << w;
        }
      }
    }
  }
}

TEST(ScheduleKinds, GPipe) {
  EXPECT_THAT(
      lists("gpipe", 2, 3, 0),
      ElementsAre("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"));
}

TEST(ScheduleKinds, OneForwardOneBackward) {
  EXPECT_THAT(
      lists("1f1b", 3, 4, 0),
      ElementsAre(
          "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
          "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"));
  EXPECT_THAT(
      lists("1f1b", 3, 1, 0), ElementsAre("0F0 0B0", "1F0 1B0", "2F0 2B0"));
  EXPECT_THAT(lists("1f1b", 1, 2, 0), ElementsAre("0F0 0B0 0F1 0B1"));
}

TEST(ScheduleKinds, Interleaved) {
  EXPECT_THAT(
      lists("interleaved", 2, 4, 2),
      ElementsAre(
          "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
          "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"));
  EXPECT_EQ(lists("interleaved", 3, 4, 1), lists("1f1b", 3, 4, 0));
  // Five microbatches on two ranks are rounds of three and two.
  EXPECT_THAT(
      lists("interleaved", 2, 5, 2)[1],
      "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 "
      "1B3 1B4");
}

TEST(ScheduleKinds, BreadthFirst) {
  EXPECT_THAT(
      lists("breadth_first", 2, 2, 2), ElementsAre(
                                           "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
                                           "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"));
  EXPECT_EQ(lists("breadth_first", 3, 4, 1), lists("gpipe", 3, 4, 0));
}

TEST(ScheduleKinds, ZeroBubble) {
  EXPECT_THAT(
      lists("zb-h1", 3, 4, 0),
      ElementsAre(
          "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
          "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
          "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"));
  EXPECT_THAT(
      lists("zb-h2", 2, 4, 0),
      ElementsAre(
          "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
          "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"));
}

TEST(ScheduleKinds, ZbV) {
  const auto schedule = make_schedule({ScheduleKind::zb_v, 2, 3, 0});
  EXPECT_THAT(schedule.rank_of_stage, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(
      lists("zb-v", 2, 3, 0), ElementsAre(
                                  "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 "
                                  "3F2 3I2 3W2 0I1 0W1 0I2 0W2",
                                  "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 "
                                  "2W1 1I1 2I2 1I2 1W1 2W2 1W2"));
}

TEST(ScheduleKinds, DualPipeV) {
  EXPECT_THAT(
      lists("dualpipev", 2, 4, 0),
      ElementsAre(
          "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 "
          "0I3 0W3",
          "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 "
          "1W3"));
}

TEST(ScheduleKinds, HaveNames) {
  ASSERT_EQ(schedule_names().size(), kScheduleKinds.size());
  for (const ScheduleKind kind : kScheduleKinds) {
    EXPECT_EQ(schedule_kind(to_string(kind)), kind) << to_string(kind);
  }
}

// What the rooms above know of a kind is what its schedules do.
TEST(ScheduleKinds, AreDescribedByWhatTheirSchedulesDo) {
  for (const ScheduleKind kind : kScheduleKinds) {
    SCOPED_TRACE(to_string(kind));
    const Schedule schedule = make_schedule({kind, 3, 7, 0});
    bool splits = false, first = true;
    for (int32_t rank = 0; rank < 3; ++rank) {
      bool backward = false;
      for (const Action& action : schedule.ranks[static_cast<size_t>(rank)]) {
        const bool forward = action.kind == ActionKind::forward;
        splits |= action.kind == ActionKind::backward_weight;
        first &= !(forward && backward);
        backward |= !forward;
      }
    }
    EXPECT_EQ(splits_backward(kind), splits);
    EXPECT_EQ(forwards_first(kind), first);
    EXPECT_EQ(is_v_shaped(kind), schedule.rank_of_stage.back() == 0);
    const std::string four = error_text([&] {
      make_schedule({kind, 3, 6, 4});
    });
    EXPECT_EQ(takes_any_stages(kind), four == "no error");
  }
}

TEST(ScheduleKinds, SayForWhichNumbersTheyAreDefined) {
  const auto error = [](ScheduleOptions options) {
    return error_text<ConfigError>([&] { make_schedule(options); });
  };
  const auto unknown = [](const char* name) {
    return error_text<ConfigError>([&] { schedule_kind(name); });
  };
  EXPECT_EQ(
      unknown("1f1"),
      "schedule \"1f1\": must be one of gpipe, 1f1b, interleaved, "
      "breadth_first, zb-h1, zb-h2, zb-v, dualpipev; did you mean \"1f1b\"?");
  EXPECT_THAT(unknown("zb_h1"), HasSubstr("did you mean \"zb-h1\"?"));
  EXPECT_EQ(
      error({ScheduleKind::gpipe, 0, 8, 0}),
      "schedule gpipe: ranks = 0, but must be from 1 to 16384; the nearest is "
      "1");
  EXPECT_EQ(
      error({ScheduleKind::gpipe, 2, -3, 0}),
      "schedule gpipe: microbatches = -3, but must be from 1 to 33554432; the "
      "nearest is 1");
  EXPECT_THAT(
      error({ScheduleKind::one_f_one_b, 2, 2, 2}),
      HasSubstr("defined for 1 alone"));
  EXPECT_THAT(
      error({ScheduleKind::zb_v, 2, 2, 3}), HasSubstr("V has 2 on each rank"));
  EXPECT_THAT(
      error({ScheduleKind::interleaved, 2, 2, -1}), HasSubstr("nearest is 1"));
  EXPECT_EQ(
      error({ScheduleKind::dualpipev, 4, 6, 0}),
      "schedule dualpipev: microbatches = 6, but 4 ranks need at least twice "
      "as many: take 8 microbatches, or 3 ranks");
  EXPECT_THAT(error({ScheduleKind::dualpipev, 1, 1, 2}), HasSubstr("or zb-v"));
  EXPECT_THAT(
      error({ScheduleKind::breadth_first, 1 << 14, 1 << 14, 64}),
      HasSubstr("more than 33554432 cells"));
  EXPECT_THAT(
      error({ScheduleKind::breadth_first, 1 << 14, 1, 65}),
      HasSubstr("stages per rank = 65, but must be from 1 to 64"));
}

}  // namespace echelon::kinds_test
