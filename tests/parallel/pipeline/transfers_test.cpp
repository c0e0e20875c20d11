#include "echelon/parallel/pipeline/transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "tests/parallel/pipeline/schedules.h"
#include "tests/support/error_text.h"

namespace echelon::pipeline::transfers_test {

std::vector<TransferPlan> plans_of(const Schedule& schedule) {
  std::vector<TransferPlan> plans;
  for (int32_t rank = 0; rank < schedule.num_ranks(); ++rank) {
    plans.push_back(plan_transfers(schedule, rank));
  }
  return plans;
}

std::string label(const TransferPlan& plan, const PairMessage& message) {
  const auto& list = message.incoming ? plan.incoming : plan.outgoing;
  return to_string(list[static_cast<size_t>(message.index)].producer);
}

// Runs the ranks with a channel per pair on which nothing overtakes: a message
// passes when it is next on both sides. Ranks post receives as late as they
// may.
void expect_no_deadlock(const Schedule& schedule) {
  const auto plans = plans_of(schedule);
  std::vector<size_t> next(plans.size(), 0);
  std::map<std::pair<int, int>, size_t> posted;  // by rank and peer
  const auto passed = [&](int rank, int peer, size_t i) {
    return posted[{rank, peer}] > i && posted[{peer, rank}] > i;
  };
  const auto place = [&](int rank, int peer, const PairMessage& message) {
    const auto& pair = plans[rank].pairs.at(peer);
    return static_cast<size_t>(
        std::find(pair.begin(), pair.end(), message) - pair.begin());
  };
  for (bool any = true; any;) {
    any = false;
    for (int rank = 0; rank < static_cast<int>(plans.size()); ++rank) {
      const auto& plan = plans[static_cast<size_t>(rank)];
      if (next[rank] == plan.actions.size()) continue;
      const auto& planned = plan.actions[next[rank]];
      if (planned.incoming >= 0) {
        const int peer = plan.incoming[planned.incoming].peer;
        const size_t i = place(rank, peer, {true, planned.incoming});
        posted[{rank, peer}] = std::max(posted[{rank, peer}], i + 1);
        if (!passed(rank, peer, i)) continue;
      }
      if (planned.outgoing >= 0) {
        const int peer = plan.outgoing[planned.outgoing].peer;
        const size_t i = place(rank, peer, {false, planned.outgoing});
        posted[{rank, peer}] = std::max(posted[{rank, peer}], i + 1);
      }
      ++next[rank];
      any = true;
    }
  }
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    EXPECT_EQ(next[rank], plans[rank].actions.size())
        << schedule.name << ": rank " << rank << " deadlocks";
  }
}

TEST(TransferPlan, BothSidesOfAPairHaveOneOrder) {
  auto kinds = schedule_names();
  kinds.push_back("random");
  for (const auto& kind : kinds) {
    for (int32_t ranks : {2, 3, 4, 8}) {
      const Schedule schedule = schedules::named(kind, ranks, 2 * ranks + 1);
      const auto plans = plans_of(schedule);
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const TransferPlan& plan = plans[static_cast<size_t>(rank)];
        size_t messages = 0;
        for (const auto& [peer, pair] : plan.pairs) {
          const auto& other = plans[static_cast<size_t>(peer)];
          const auto& theirs = other.pairs.at(rank);
          ASSERT_EQ(pair.size(), theirs.size());
          messages += pair.size();
          for (size_t i = 0; i < pair.size(); ++i) {
            EXPECT_NE(pair[i].incoming, theirs[i].incoming);
            EXPECT_EQ(label(plan, pair[i]), label(other, theirs[i]));
          }
        }
        EXPECT_EQ(messages, plan.incoming.size() + plan.outgoing.size());
      }
      expect_no_deadlock(schedule);
    }
  }
}

TEST(TransferPlan, LastBackwards) {
  const auto plan = plan_transfers(schedules::named("zb-v", 2, 4), 0);
  std::map<int32_t, std::string> last;
  for (const auto& planned : plan.actions) {
    if (!planned.last_backward) continue;
    EXPECT_TRUE(
        last.emplace(planned.action.stage, to_string(planned.action)).second);
  }
  const std::map<int32_t, std::string> expected = {{0, "0W3"}, {3, "3W3"}};
  EXPECT_EQ(last, expected);
}

TEST(TransferPlan, EvaluationWorksForAnyPlacement) {
  const std::vector<std::vector<int32_t>> placements = {
      {0},       {0, 1, 2},          {0, 1, 0, 1},      {0, 1, 1, 0},
      {0, 0, 1}, {2, 0, 1, 0, 0, 2}, {1, 0, 0, 1, 1, 0}};
  for (const auto& placement : placements) {
    const int32_t ranks =
        1 + *std::max_element(placement.begin(), placement.end());
    const Schedule schedule = forward_schedule(placement, ranks, 5);
    std::set<std::string> actions;
    for (const auto& list : schedule.ranks) {
      for (const auto& action : list) actions.insert(to_string(action));
    }
    EXPECT_EQ(actions.size(), 5 * placement.size());
    expect_no_deadlock(schedule);
  }
}

TEST(TransferPlan, MissingActionIsNamed) {
  Schedule schedule = schedules::named("gpipe", 2, 2);
  schedule.ranks[0].erase(schedule.ranks[0].begin());
  EXPECT_NE(
      error_text<ConfigError>([&] {
        plan_transfers(schedule, 1);
      }).find("1F0 needs the forward of stage 0, microbatch 0"),
      std::string::npos);
}

}  // namespace echelon::pipeline::transfers_test
