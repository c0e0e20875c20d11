// The command `echelon schedule`.
#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"
#include "echelon/schedule/options.h"
#include "tests/cli/typed.h"

namespace echelon::schedule_cli_test {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class ScheduleCommand : public testing::Test {
 protected:
  Outcome run(const std::string& arguments, const std::string& before = "") {
    return typed(folder_, "schedule " + arguments, before);
  }

  TempFolder folder_;
};

TEST_F(ScheduleCommand, DrawsASmallOne) {
  const auto out = printed(run("--kind 1f1b --stages 2 --microbatches 3"));
  EXPECT_EQ(
      out,
      "1f1b: 2 ranks of 1 stage each, 3 microbatches\n"
      "length 12 when F = I = W = 1 and B = 2\n"
      "bubble 25.0 %\n"
      "\n"
      "By tick. F0: forward of microbatch 0. B: backward; I, W: its halves.\n"
      "\n"
      "        0              5              10 \n"
      "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---\n"
      "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .\n"
      "\n"
      "rank  stage  stored at most  idle\n"
      "0     0      2               25.0 %\n"
      "1     1      1               25.0 %\n");
}

TEST_F(ScheduleCommand, NamesStagesWhereARankHasSeveral) {
  const auto outcome = run("--kind zb-v --stages 2 --microbatches 4");
  EXPECT_THAT(
      outcome.out,
      AllOf(
          StartsWith("zb-v: 2 ranks of 2 stages each, 4 microbatches\n"),
          HasSubstr("rank 0  0F0 0F1 0F2 3F0 3I0 3W0"),
          HasSubstr("bubble 4.0 %, or 0.0 % where ranks start the next step"),
          HasSubstr("rank  stages  stored at most  together  idle\n"
                    "0     0 3     4 1             4         4.0 %\n")));
}

TEST_F(ScheduleCommand, PrintsEveryKindInEveryFormat) {
  for (const auto& kind : schedule_names()) {
    const std::string arguments = "--kind " + kind + " --stages 3 --format ";
    EXPECT_THAT(run(arguments + "text").out, StartsWith(kind + ": 3 ranks"));
    const auto schedule = make_schedule({schedule_kind(kind), 3, 6, 0});
    std::ostringstream csv;
    write_schedule_csv(schedule, csv);
    EXPECT_EQ(run(arguments + "csv").out, csv.str());

    const auto printed = json::parse(run(arguments + "json").out);
    EXPECT_EQ(printed["name"], kind);
    EXPECT_EQ(printed["num_microbatches"], 6);
    EXPECT_EQ(printed["rank_of_stage"], json(schedule.rank_of_stage));
    ASSERT_EQ(printed["ranks"].size(), 3u);
    for (size_t rank = 0; rank < 3; ++rank) {
      std::vector<std::string> actions;
      for (const auto& action : schedule.ranks[rank]) {
        actions.push_back(to_string(action));
      }
      EXPECT_EQ(printed["ranks"][rank]["actions"], json(actions)) << kind;
      EXPECT_EQ(printed["ranks"][rank]["begin"].size(), actions.size());
    }
    const std::string page = run(arguments + "html").out;
    for (const auto& part :
         {std::string("<!DOCTYPE html>"), kind + ": 3 ranks of",
          std::string("rank 2"), std::string("</html>")}) {
      EXPECT_NE(page.find(part), std::string::npos) << part;
    }
  }
}

TEST_F(ScheduleCommand, JsonHasTheFigures) {
  const auto printed =
      json::parse(run("--kind zb-h2 --stages 3 --microbatches 6 --json").out);
  EXPECT_EQ(printed["length"], 20);
  EXPECT_DOUBLE_EQ(printed["bubble"], 0.1);
  EXPECT_EQ(printed["span_bubble"], 0);
  EXPECT_EQ(printed["stored_activations"], json({5, 5, 5}));
  EXPECT_EQ(printed["ranks"][1]["begin"][0], 1);
  EXPECT_EQ(printed["ranks"][1]["stages"], json({1}));
}

TEST_F(ScheduleCommand, WritesAFileThatItReads) {
  EXPECT_EQ(
      run("--kind interleaved --stages 4 --per-rank 3 --microbatches 8 "
          "--format csv --output mine.csv")
          .out,
      "");
  const auto read = printed(run("--file mine.csv"));
  EXPECT_THAT(read, StartsWith("mine.csv: 4 ranks of 3 stages each, 8 mi"));
  EXPECT_EQ(
      run("--file mine.csv --format csv").out,
      read_file(folder_.path("mine.csv")));
}

TEST_F(ScheduleCommand, NamesTheFirstErrorOfAFile) {
  for (const auto& [csv, message] :
       std::vector<std::pair<std::string, std::string>>{
           {"0F0,0F0,0B0\n",
            "schedule bad.csv: rank 0, action 2 (0F0) is repeated;"},
           {"0F0,0B0\n1F0\n", "schedule bad.csv: rank 1 lacks 1B0;"},
           {"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "schedule bad.csv: deadlock: rank 0, action 2 (0B0) waits for 1B0 "
            "of rank 1; rank 1, action 2 (1F1)"},
           {"0F0;0B0\n", "bad.csv, line 1, column 1 (cell 1): \"0F0;0B0\""}}) {
    folder_.write("bad.csv", csv);
    const auto outcome = run("--file bad.csv");
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, StartsWith(message));
  }
}

TEST_F(ScheduleCommand, RefusesWrongValues) {
  folder_.write("s.csv", "0F0,0B0\n");
  for (const auto& [arguments, message] :
       std::vector<std::pair<std::string, std::string>>{
           {"--kind zbv --stages 2", "did you mean \"zb-v\"?"},
           {"--kind 1f1b", "--stages is missing"},
           {"--stages 0", "--stages 0: must be a whole number from 1 to"},
           {"--stages four", "--stages four: must be a whole number"},
           {"--stages 2 --microbatches 1.5", "--microbatches 1.5: must be"},
           {"--stages 20000", "ranks = 20000, but must be from 1 to 16384"},
           {"--kind zb-v --stages 2 --per-rank 3", "V has 2 on each rank"},
           {"--kind dualpipev --stages 4 --microbatches 6",
            "take 8 microbatches, or 3 ranks"},
           {"--stages 2 --format jsn", "did you mean \"json\"?"},
           {"--stages 2 --format csv --json", "--json with --format csv"},
           {"--file s.csv --stages 2", "--stages 2 with --file s.csv"},
           {"--file none.csv", "none.csv: cannot be read: No such file"},
           {"--file .", ".: cannot be read"},
           {"--stages 2 --output no/f", "--output no/f: cannot be written: No"},
           {"--stage 2", "unknown flag --stage; did you mean \"--stages\"?"}}) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr(message));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1);
  }
}

TEST_F(ScheduleCommand, SummarisesALargeOne) {
  for (const std::string kind : {"1f1b", "zb-v"}) {
    const auto text = printed(
        run("--kind " + kind + " --stages 1024 --microbatches 8192",
            "ulimit -v 2097152 && "));
    EXPECT_THAT(
        text, AllOf(
                  StartsWith(kind + ": 1,024 ranks"),
                  HasSubstr("is left out: --format csv has all"),
                  HasSubstr("\n1023  1023"),
                  HasSubstr("--format json has all 1,024 ranks.")));
    EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 60);
  }
}

TEST_F(ScheduleCommand, SplitsAWideGridIntoBands) {
  const auto outcome = run("--kind gpipe --stages 2 --microbatches 40");
  EXPECT_THAT(outcome.out, HasSubstr("rank 1  .   F0"));
  for (const auto& line : lines_of(outcome.out)) EXPECT_LE(line.size(), 120u);
  EXPECT_THAT(outcome.out, Not(HasSubstr("\033")));
}

}  // namespace echelon::schedule_cli_test
