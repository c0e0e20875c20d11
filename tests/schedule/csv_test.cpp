#include "echelon/schedule/csv.h"

#include <gmock/gmock.h>

#include <random>
#include <sstream>

#include "echelon/schedule/check.h"
#include "echelon/schedule/options.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::csv_test {

using testing::ElementsAre;
using testing::HasSubstr;

std::string written(const Schedule& schedule) {
  std::ostringstream out;
  write_schedule_csv(schedule, out);
  return out.str();
}

std::string fault(const std::string& text) {
  return error_text<ConfigError>([&] { parse_schedule_csv(text, "f.csv"); });
}

TEST(ScheduleCsv, PutsEachActionAtItsTick) {
  EXPECT_EQ(
      written(make_schedule({ScheduleKind::one_f_one_b, 2, 2, 0})),
      "0F0,0F1,,0B0,,0B1\n"
      ",1F0,1B0,1F1,1B1\n");
}

TEST(ScheduleCsv, ReadsBackEveryKind) {
  for (const auto& kind : schedule_names()) {
    for (const int32_t ranks : {1, 2, 5}) {
      Schedule schedule =
          make_schedule({schedule_kind(kind), ranks, 2 * ranks + 3, 0});
      const auto read = parse_schedule_csv(written(schedule), "f.csv");
      EXPECT_NO_THROW(check(read)) << kind;
      schedule.name = "f.csv";
      EXPECT_EQ(read, schedule) << kind;
    }
  }
}

TEST(ScheduleCsv, ALongRowIsWrittenWhole) {
  Schedule schedule = make_schedule({ScheduleKind::gpipe, 2, 30000, 0});
  const auto read = parse_schedule_csv(written(schedule), "gpipe");
  EXPECT_EQ(read, schedule);
}

TEST(ScheduleCsv, TheRankThatNamesAStageHoldsIt) {
  const auto schedule = parse_schedule_csv("1F0,1B0\n0F0,0B0\n", "f.csv");
  EXPECT_THAT(schedule.rank_of_stage, ElementsAre(1, 0));
  EXPECT_EQ(schedule.num_microbatches, 1);
  EXPECT_NO_THROW(check(schedule));
}

TEST(ScheduleCsv, ReadsWindowsLinesSpacesAMarkAndIdleTicks) {
  const auto plain = parse_schedule_csv("0F0,0B0\n1F0,1B0\n", "f.csv");
  for (const char* text :
       {"0F0,0B0\r\n1F0,1B0\r\n", "0F0,0B0\n1F0,1B0",
        " 0F0 ,\t0B0\n1F0,1B0 \n\n", ",,0F0,,0B0,,\n,1F0,1B0,,\n,,\n",
        "\xEF\xBB\xBF"
        "0F0,0B0\n1F0,1B0\n"}) {
    EXPECT_EQ(parse_schedule_csv(text, "f.csv"), plain) << text;
  }
}

TEST(ScheduleCsv, AnOverlappedPairIsItsTwoActions) {
  const auto schedule = parse_schedule_csv(
      "0F0,1F0,(0F1;1B0)OVERLAP_F_B,( 0B0 ; 1F1 )OVERLAP_F_B,1B1,0B1\n",
      "f.csv");
  std::vector<std::string> list;
  for (const auto& action : schedule.ranks[0]) {
    list.push_back(to_string(action));
  }
  EXPECT_THAT(
      list,
      ElementsAre("0F0", "1F0", "0F1", "1B0", "0B0", "1F1", "1B1", "0B1"));
  EXPECT_NO_THROW(check(schedule));
}

TEST(ScheduleCsv, NamesWhereAWrongCellStands) {
  EXPECT_EQ(
      fault("0F0,0B0\n1F0, 1X0\n"),
      "f.csv, line 2, column 6 (cell 2): \"1X0\" is no action; write stage, "
      "one of F, B, I and W, and microbatch, as in 0F1");
  for (const char* cell :
       {"F0", "0F", "0", "0f1", "0F1x", "-1F0", "0F-1", "0F 1", "0 F1", "+0F1",
        "0F0 0B0", "0.5F1", "\"0F0\"", "\xF0\x9F\x98\x80"}) {
    EXPECT_THAT(fault(cell), HasSubstr("line 1, column 1 (cell 1): \""))
        << cell;
    EXPECT_THAT(fault(cell), HasSubstr("is no action")) << cell;
  }
  EXPECT_THAT(fault("0F0,1SEND_F0"), HasSubstr("cell 2): \"1SEND_F0\""));
  EXPECT_THAT(fault("0F0,0REDUCE_GRAD"), HasSubstr("computes nothing"));
  EXPECT_THAT(fault("0F99999999999"), HasSubstr("a number above 2147483646"));
  EXPECT_THAT(fault("2147483647F0"), HasSubstr("a number above 2147483646"));
}

TEST(ScheduleCsv, NamesAWrongOverlap) {
  EXPECT_THAT(fault("(0F0;0B0)OVERLAP"), HasSubstr("does not end as"));
  EXPECT_THAT(fault("(0F0)OVERLAP_F_B"), HasSubstr("name both"));
  EXPECT_THAT(fault("(0F0;)OVERLAP_F_B"), HasSubstr("is no action"));
  EXPECT_THAT(fault("(0F0;0B0;0F1)OVERLAP_F_B"), HasSubstr("is no action"));
  EXPECT_THAT(
      fault("(0F0;1F0)OVERLAP_F_B"), HasSubstr("one forward and one backward"));
}

TEST(ScheduleCsv, NamesAnEmptyRowAndAnEmptyFile) {
  EXPECT_THAT(fault(""), HasSubstr("f.csv: holds no schedule"));
  EXPECT_THAT(fault("\n,,\n"), HasSubstr("f.csv: holds no schedule"));
  EXPECT_THAT(
      fault("0F0,0B0\n\n1F0,1B0\n"),
      HasSubstr("f.csv, line 2: rank 1 has no actions"));
}

TEST(ScheduleCsv, HugeNumbersAskForNoMemory) {
  EXPECT_EQ(
      fault("2147483646F0"),
      "f.csv: names stage 2147483646, but has 1 action in all; count from 0, "
      "without gaps");
  EXPECT_THAT(fault("0F7,0B7"), HasSubstr("names microbatch 7"));
  // Few enough each, but not together.
  std::string text;
  for (int i = 0; i < 60000; ++i) text += "0F" + std::to_string(i) + ",";
  for (int i = 1; i < 60000; ++i) text += std::to_string(i) + "F0,";
  const auto schedule = parse_schedule_csv(text, "f.csv");
  EXPECT_THAT(
      error_text<ConfigError>([&] { check(schedule); }),
      HasSubstr("rank 0 lacks 1F1;"));
}

TEST(ScheduleCsv, AGapInTheStagesIsAStageOnNoRank) {
  const auto schedule = parse_schedule_csv("0F0,0B0\n2F0,2B0\n", "f.csv");
  EXPECT_THAT(
      error_text<ConfigError>([&] { check(schedule); }),
      HasSubstr("schedule f.csv: stage 1 is on no rank"));
}

TEST(ScheduleCsv, RandomChangesNeverGetPastBoth) {
  // An accepted schedule reads back the same after it is written.
  std::mt19937 random(3);
  const std::string text =
      written(make_schedule({ScheduleKind::zb_v, 3, 6, 0}));
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string changed = text;
    for (size_t edits = 1 + random() % 2; edits > 0; --edits) {
      const std::string letters = "0123456789FBIW,,\n;()x";
      changed[random() % changed.size()] = letters[random() % letters.size()];
    }
    try {
      const auto schedule = parse_schedule_csv(changed, "f.csv");
      check(schedule);
      EXPECT_EQ(parse_schedule_csv(written(schedule), "f.csv"), schedule);
      ++accepted;
    } catch (const ConfigError&) {
    }
  }
  EXPECT_LT(accepted, 1000);
}

TEST(ScheduleCsv, ReadsAFile) {
  const TempFolder folder;
  const auto path = folder.write("s.csv", "0F0,0B0\n");
  EXPECT_EQ(read_schedule_csv(path).name, path);
  const auto error = error_text<ConfigError>(
      [&] { read_schedule_csv(folder.path("none.csv")); });
  EXPECT_THAT(error, HasSubstr("none.csv: cannot be read: No such file"));
}

TEST(ScheduleCsv, ADeadlockIsNotWritten) {
  auto schedule = make_schedule({ScheduleKind::gpipe, 2, 1, 0});
  std::swap(schedule.ranks[0][0], schedule.ranks[0][1]);
  EXPECT_THAT(
      error_text<ConfigError>([&] { written(schedule); }),
      HasSubstr("deadlocks"));
}

}  // namespace echelon::csv_test
