// The checker finds each kind of fault and names it, also in hundreds of valid
// schedules that were broken at random.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <random>

#include "echelon/schedule/check.h"
#include "echelon/schedule/options.h"
#include "tests/support/error_text.h"

namespace echelon::check_test {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

std::string fault(const Schedule& schedule) {
  return error_text<ConfigError>([&] { check(schedule); });
}

Action action(const std::string& text) {
  static const std::string kLetters = "FBIW";
  const size_t at = text.find_first_of(kLetters);
  return {
      static_cast<ActionKind>(kLetters.find(text[at])),
      std::stoi(text.substr(0, at)), std::stoi(text.substr(at + 1))};
}

// Two stages on two ranks, two microbatches, with these lists.
Schedule two(std::vector<std::vector<std::string>> lists) {
  Schedule schedule{
      .name = "mine", .num_microbatches = 2, .rank_of_stage = {0, 1}};
  for (const auto& list : lists) {
    auto& actions = schedule.ranks.emplace_back();
    for (const auto& text : list) actions.push_back(action(text));
  }
  return schedule;
}

const std::vector<std::string> kFirst = {"0F0", "0F1", "0B0", "0B1"};
const std::vector<std::string> kLast = {"1F0", "1B0", "1F1", "1B1"};

TEST(ScheduleCheck, AcceptsAValidOne) {
  EXPECT_EQ(fault(two({kFirst, kLast})), "no error");
  EXPECT_EQ(
      fault(two({kFirst, {"1F0", "1I0", "1F1", "1B1", "1W0"}})), "no error");
}

TEST(ScheduleCheck, NamesARepeatedAction) {
  EXPECT_EQ(
      fault(two({{"0F0", "0F1", "0B0", "0F1", "0B1"}, kLast})),
      "schedule mine: rank 0, action 4 (0F1) is repeated; it stands as action "
      "2 already: remove one");
}

TEST(ScheduleCheck, NamesAMissingAction) {
  EXPECT_EQ(
      fault(two({{"0F0", "0F1", "0B0"}, kLast})),
      "schedule mine: rank 0 lacks 0B1; each stage computes each of the 2 "
      "microbatches forwards and backwards, by B, or by I and W");
  EXPECT_THAT(
      fault(two({kFirst, {"1F0", "1B0"}})), HasSubstr("rank 1 lacks 1F1;"));
  EXPECT_THAT(
      fault(two({kFirst, {"1F0", "1I0", "1F1", "1B1"}})),
      HasSubstr("rank 1 lacks 1W0; I and W are one backward"));
}

TEST(ScheduleCheck, NamesAnActionOfAnotherRanksStage) {
  EXPECT_EQ(
      fault(two({{"0F0", "1F0"}, kLast})),
      "schedule mine: rank 0, action 2 (1F0) is of a stage that rank 1 holds; "
      "a stage is computed by one rank alone");
}

TEST(ScheduleCheck, NamesWhatIsNotThere) {
  EXPECT_THAT(
      fault(two({{"2F0"}, kLast})),
      HasSubstr("(2F0) is of stage 2, but there are 2 stages, from 0"));
  EXPECT_THAT(
      fault(two({{"0F2"}, kLast})),
      HasSubstr("(0F2) is of microbatch 2, but there are 2, from 0"));
  auto schedule = two({kFirst, kLast});
  schedule.ranks[0][0].microbatch = -1;
  EXPECT_THAT(fault(schedule), HasSubstr("is of microbatch -1"));
  schedule.ranks[0][0] = {ActionKind::forward, -1, 0};
  EXPECT_THAT(fault(schedule), HasSubstr("is of stage -1"));
}

TEST(ScheduleCheck, NamesAStageWithoutARankAndARankWithoutAStage) {
  auto schedule = two({kFirst, kLast});
  for (const auto& [owners, says] :
       std::vector<std::pair<std::vector<int32_t>, const char*>>{
           {{0, 1, 2}, "stage 2 is on no rank: it names rank 2"},
           {{0, -1}, "stage 1 is on no rank;"},
           {{0, 0}, "rank 1 holds no stage"},
           {{}, "no stages"}}) {
    schedule.rank_of_stage = owners;
    EXPECT_THAT(fault(schedule), HasSubstr(says));
  }
  schedule = two({});
  EXPECT_THAT(fault(schedule), HasSubstr("no ranks"));
  schedule = two({kFirst, kLast});
  schedule.num_microbatches = 0;
  EXPECT_THAT(fault(schedule), HasSubstr("0 microbatches"));
}

TEST(ScheduleCheck, NamesTwoBackwardsOfOneMicrobatch) {
  EXPECT_EQ(
      fault(two({{"0F0", "0I0", "0B0"}, kLast})),
      "schedule mine: rank 0, action 3 (0B0) stands beside 0I0; a backward is "
      "either B, or I and W: remove one");
  EXPECT_THAT(
      fault(two({{"0F0", "0B0", "0W0"}, kLast})),
      HasSubstr("(0W0) stands beside 0B0"));
  EXPECT_THAT(
      fault(two({{"0F0", "0B0", "0I0"}, kLast})),
      HasSubstr("(0I0) stands beside 0B0"));
}

TEST(ScheduleCheck, NamesAWrongOrderOfOneMicrobatch) {
  EXPECT_EQ(
      fault(two({{"0B0", "0F0"}, kLast})),
      "schedule mine: rank 0, action 1 (0B0) comes before its forward 0F0; put "
      "that before it");
  EXPECT_THAT(
      fault(two({{"0F0", "0W0", "0I0"}, kLast})),
      HasSubstr("(0W0) comes before 0I0, from which"));
}

TEST(ScheduleCheck, NamesTheRanksThatWaitForEachOther) {
  EXPECT_EQ(
      fault(two({{"0F0", "0B0", "0F1", "0B1"}, {"1F0", "1F1", "1B0", "1B1"}})),
      "schedule mine: deadlock: rank 0, action 2 (0B0) waits for 1B0 of rank "
      "1; rank 1, action 2 (1F1) waits for 0F1 of rank 0; none of them can go "
      "on: change the order of one");
  Schedule self{
      .name = "self",
      .num_microbatches = 1,
      .rank_of_stage = {0, 0},
      .ranks = {{action("1F0"), action("0F0"), action("1B0"), action("0B0")}}};
  EXPECT_EQ(
      fault(self),
      "schedule self: deadlock: rank 0, action 1 (1F0) waits for 0F0 of rank 0 "
      "itself, which comes later; none of them can go on: change the order of "
      "one");
}

TEST(ScheduleCheck, NamesACircleAndNotThoseWhoWaitForIt) {
  // Ranks 1 and 2 wait for each other, rank 0 for rank 1.
  auto schedule = make_schedule({ScheduleKind::one_f_one_b, 3, 2, 0});
  for (auto* text : {"1F0", "1B0", "1F1", "1B1"}) {
    if (text == std::string("1F0")) schedule.ranks[1].clear();
    schedule.ranks[1].push_back(action(text));
  }
  schedule.ranks[2] = {
      action("2F0"), action("2F1"), action("2B0"), action("2B1")};
  EXPECT_THAT(
      fault(schedule),
      AllOf(
          StartsWith("schedule 1f1b: deadlock: rank 1, action 2 (1B0)"),
          HasSubstr("rank 2, action 2 (2F1) waits for 1F1 of rank 1; none")));
}

TEST(ScheduleCheck, ALongCircleIsCutShort) {
  // The first rank wants what comes back to it before it lets go of anything.
  constexpr int32_t kRanks = 9;
  Schedule schedule = make_schedule({ScheduleKind::interleaved, kRanks, 1, 2});
  std::swap(schedule.ranks[0][0], schedule.ranks[0][1]);
  EXPECT_THAT(fault(schedule), HasSubstr("and so on through 5 more ranks"));
}

// One way to break a schedule; what the checker then has to say.
struct Broken {
  Schedule schedule;
  std::vector<std::string> words;  // one of them
};

using Random = std::mt19937;

size_t below(Random& random, size_t bound) {
  return random() % bound;
}

using List = std::vector<Action>;

List& any_list(Schedule& schedule, Random& random) {
  return schedule.ranks[below(random, schedule.ranks.size())];
}

Action take_any(List& list, Random& random) {
  const auto at =
      list.begin() + static_cast<std::ptrdiff_t>(below(random, list.size()));
  const Action taken = *at;
  list.erase(at);
  return taken;
}

void insert_anywhere(List& list, const Action& action, Random& random) {
  const size_t at = below(random, list.size() + 1);
  list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), action);
}

Broken repeat(Schedule schedule, Random& random) {
  auto& list = any_list(schedule, random);
  const Action copy = list[below(random, list.size())];
  insert_anywhere(list, copy, random);
  return {
      schedule,
      {"(" + to_string(copy) + ") is repeated",
       "(" + to_string(copy) + ") comes before"}};
}

Broken omit(Schedule schedule, Random& random) {
  const Action gone = take_any(any_list(schedule, random), random);
  return {
      schedule,
      {"lacks " + to_string(gone) + ";",
       "comes before its forward " + to_string(gone),
       "comes before " + to_string(gone) + ","}};
}

Broken move(Schedule schedule, Random& random) {
  const size_t from = below(random, schedule.ranks.size());
  const size_t to = (from + 1 + below(random, schedule.ranks.size() - 1)) %
                    schedule.ranks.size();
  const Action lost = take_any(schedule.ranks[from], random);
  insert_anywhere(schedule.ranks[to], lost, random);
  return {
      schedule,
      {"(" + to_string(lost) + ") is of a stage that rank " +
           std::to_string(from) + " holds",
       "comes before its forward " + to_string(lost),
       "comes before " + to_string(lost) + ","}};
}

// An action before one that must precede it on its own rank.
Broken reverse(Schedule schedule, Random& random) {
  auto& list = any_list(schedule, random);
  for (;;) {
    const size_t at = below(random, list.size());
    const Action late = list[at];
    if (late.kind == ActionKind::forward) continue;
    const auto need = std::ranges::find_if(list, [&](const auto& a) {
      return a.stage == late.stage && a.microbatch == late.microbatch;
    });
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(at));
    list.insert(need, late);
    return {schedule, {"(" + to_string(late) + ") comes before its forward"}};
  }
}

TEST(ScheduleCheck, FindsRandomFaultsAndNamesThem) {
  Random random(7);
  const std::vector<std::function<Broken(Schedule, Random&)>> ways = {
      repeat, omit, move, reverse};
  for (int round = 0; round < 400; ++round) {
    const auto& kinds = schedule_names();
    const std::string kind = kinds[below(random, kinds.size())];
    const auto ranks = static_cast<int32_t>(2 + below(random, 4));
    const auto microbatches =
        static_cast<int32_t>(2 * ranks + below(random, 9));
    const Schedule valid =
        make_schedule({schedule_kind(kind), ranks, microbatches, 0});
    const Broken broken = ways[below(random, ways.size())](valid, random);
    std::vector<testing::Matcher<std::string>> any;
    for (const auto& word : broken.words) any.push_back(HasSubstr(word));
    EXPECT_THAT(fault(broken.schedule), testing::AnyOfArray(any))
        << kind << " " << ranks << " x " << microbatches;
  }
}

// Whether the lists can run: the slow and obvious way.
bool can_run(const Schedule& schedule) {
  std::vector<size_t> next(schedule.ranks.size());
  std::vector<Action> done;
  const auto has = [&](ActionKind kind, int32_t stage, int32_t m) {
    return std::ranges::find(done, Action{kind, stage, m}) != done.end();
  };
  const auto ready = [&](const Action& a) {
    if (a.kind == ActionKind::forward) {
      return a.stage == 0 || has(a.kind, a.stage - 1, a.microbatch);
    }
    if (a.kind == ActionKind::backward_weight) return true;
    return a.stage + 1 == schedule.num_stages() ||
           has(ActionKind::backward, a.stage + 1, a.microbatch) ||
           has(ActionKind::backward_input, a.stage + 1, a.microbatch);
  };
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t rank = 0; rank < next.size(); ++rank) {
      const auto& list = schedule.ranks[rank];
      if (next[rank] == list.size() || !ready(list[next[rank]])) continue;
      done.push_back(list[next[rank]++]);
      progress = true;
    }
  }
  for (size_t rank = 0; rank < next.size(); ++rank) {
    if (next[rank] < schedule.ranks[rank].size()) return false;
  }
  return true;
}

// Swapping two actions of a rank may or may not deadlock.
TEST(ScheduleCheck, FindsADeadlockExactlyWhenThereIsOne) {
  Random random(11);
  int deadlocks = 0;
  int runs = 0;
  for (int round = 0; round < 600; ++round) {
    const auto& kinds = schedule_names();
    const std::string kind = kinds[below(random, kinds.size())];
    const auto ranks = static_cast<int32_t>(2 + below(random, 3));
    Schedule schedule = make_schedule(
        {schedule_kind(kind), ranks,
         static_cast<int32_t>(2 * ranks + below(random, 3)), 0});
    for (size_t swaps = 1 + below(random, 3); swaps > 0; --swaps) {
      auto& list = any_list(schedule, random);
      const size_t at = below(random, list.size() - 1);
      const size_t to = std::min(at + 1 + below(random, 4), list.size() - 1);
      std::swap(list[at], list[to]);
    }
    const std::string text = fault(schedule);
    if (text.find("comes before") != std::string::npos) continue;
    const bool deadlock = text.find("deadlock") != std::string::npos;
    EXPECT_TRUE(deadlock || text == "no error") << text;
    EXPECT_EQ(deadlock, !can_run(schedule)) << text;
    ++(deadlock ? deadlocks : runs);
  }
  EXPECT_GT(deadlocks, 50);
  EXPECT_GT(runs, 50);
}

}  // namespace echelon::check_test
