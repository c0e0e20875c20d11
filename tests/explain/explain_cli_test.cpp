// `echelon explain` as people and scripts call it.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/text/table.h"
#include "tests/explain/made_run.h"
#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::explain::explain_cli_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing_support::Command;

const std::string kEchelon = program("echelon");

class ExplainCommand : public testing::Test {
 protected:
  // The last rank takes 1.5 times as long, and loads for half of its step.
  void SetUp() override {
    const made::DataParallel slow{.times = [](int rank, int64_t) {
      const double factor = rank == 1 ? 1.5 : 1;
      return made::RankStep{
          .data = rank == 1 ? 80.0 : 0.5,
          .forward = 30 * factor,
          .backward = 60 * factor};
    }};
    made::write_run(run_, made::job_of("dp=2"), timeline_of(slow));
  }

  testing_support::TempFolder folder_;
  const std::string run_ = folder_.path() + "/run";
};

size_t longest_line(const std::string& text) {
  std::istringstream lines(text);
  size_t longest = 0;
  for (std::string line; std::getline(lines, line);) {
    longest = std::max(longest, columns(line));
  }
  return longest;
}

TEST_F(ExplainCommand, SaysWhatHeldARunBack) {
  Command command({kEchelon, "explain", run_, "--cluster", "h100-sxm:8"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  const std::string text = command.out();
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("made, dp=2\n"), HasSubstr("1  data loading, "),
          HasSubstr("2  straggler, "), HasSubstr("   Diagnosis  Rank 1 waits "),
          HasSubstr("   Fix        "), HasSubstr("   Why        "),
          HasSubstr("   Gain       "),
          HasSubstr("                [data]\n                workers = ")));
  EXPECT_LE(longest_line(text), 80u) << text;
  EXPECT_THAT(text, Not(HasSubstr("\033")));
  // A page sets commands between backticks as code; a terminal has quotes.
  EXPECT_THAT(text, AllOf(HasSubstr("'echelon doctor'"), Not(HasSubstr("`"))));
}

TEST_F(ExplainCommand, SaysTheLargestWaitWhereNothingIsFound) {
  const made::DataParallel quick{.buckets = 4, .transfer = 8};
  made::write_run(run_, made::job_of("dp=2"), timeline_of(quick));
  Command command({kEchelon, "explain", run_, "--cluster", "h100-sxm:8"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  EXPECT_THAT(
      command.out(),
      HasSubstr(
          "Nothing was found that held this run back. The largest wait is "
          "communication\nthat nothing hides, 7.8 % of the step, all along dp. "
          "Less than 10 % for one\ncause is no finding"));
}

TEST_F(ExplainCommand, PrintsTheSameAsJson) {
  Command command({kEchelon, "explain", run_ + "/timeline.json", "--json"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  const auto json = nlohmann::json::parse(command.out());
  ASSERT_EQ(json.at("findings").size(), 2u);
  const auto& first = json.at("findings").at(0);
  EXPECT_EQ(first.at("fault"), "data loading");
  EXPECT_EQ(first.at("ranks"), std::vector<int>{1});
  EXPECT_GT(first.at("share").get<double>(), 0.3);
  EXPECT_EQ(first.at("gain_source"), "measured");
  EXPECT_EQ(json.at("recorded_steps"), 10);
}

TEST_F(ExplainCommand, ErrorsSayWhatIsWrong) {
  Command none({kEchelon, "explain", folder_.path() + "/none"});
  EXPECT_EQ(none.wait(), 3);
  EXPECT_THAT(none.err(), HasSubstr("there is no such run"));
  Command nothing({kEchelon, "explain", folder_.path()});
  EXPECT_EQ(nothing.wait(), 3);
  EXPECT_THAT(
      nothing.err(), HasSubstr("neither timeline.json nor metrics.jsonl"));
  Command cluster({kEchelon, "explain", run_, "--cluster", "h100-smx:8"});
  EXPECT_EQ(cluster.wait(), 2);
  EXPECT_THAT(cluster.err(), HasSubstr("h100-sxm"));
  Command missing({kEchelon, "explain"});
  EXPECT_EQ(missing.wait(), 2);
}

TEST_F(ExplainCommand, IsAmongTheCommandsThatShellsComplete) {
  Command command({kEchelon, "completion", "bash"});
  ASSERT_EQ(command.wait(), 0);
  EXPECT_THAT(command.out(), HasSubstr("\" explain\") words=\"--"));
}

}  // namespace echelon::explain::explain_cli_test
