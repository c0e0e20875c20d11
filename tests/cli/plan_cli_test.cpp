// The command `echelon plan`.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/cli/typed.h"

namespace echelon::plan_cli_test {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const std::string kFits = "--model llama3-8b --cluster h100-sxm:8 --batch 64 ";
const std::string kLarge = "--model llama3-70b --cluster h100-sxm:2 --batch 8 ";

class PlanCommand : public testing::Test {
 protected:
  Outcome run(const std::string& arguments) {
    return typed(folder_, "plan " + arguments);
  }

  TempFolder folder_;
};

TEST_F(PlanCommand, PrintsATableAndDetailsWhenAsked) {
  const Outcome brief = run(kFits);
  EXPECT_EQ(brief.exit_code, 0);
  EXPECT_LT(lines_of(brief.out).size(), 40u);
  EXPECT_THAT(
      brief.out, AllOf(
                     HasSubstr("The best layouts\n     layout"),
                     HasSubstr("\nNeed\n"), HasSubstr("\nPlan\n"),
                     Not(HasSubstr("Diagnosis")), Not(HasSubstr("[layout]"))));
  const std::string verbose = run(kFits + "--verbose").out;
  EXPECT_THAT(verbose, AllOf(HasSubstr("[layout]"), HasSubstr("Why not")));
}

TEST_F(PlanCommand, ATerminalMayBeNarrow) {
  const Outcome outcome = shell(
      folder_, "NO_COLOR=1 LC_ALL=C TERM=xterm script -qec 'stty cols 40; " +
                   program("echelon") + " plan " + kFits + "--verbose" +
                   "' /dev/null");
  // The configuration is to be copied as it is.
  const std::string marks[] = {
      "The configuration for echelon train", "Why not"};
  const size_t begin = outcome.out.find(marks[0]);
  const size_t end = outcome.out.find(marks[1]);
  ASSERT_NE(begin, std::string::npos) << outcome.out;
  ASSERT_NE(end, std::string::npos);
  const std::string text =
      outcome.out.substr(0, begin) + outcome.out.substr(end);
  EXPECT_THAT(text, HasSubstr(", memory of a device "));
  for (const auto& line : lines_of(text)) {
    EXPECT_LE(line.size(), 41u) << line;  // with the carriage return
  }
}

TEST_F(PlanCommand, ALayoutForEachNumberOfDevices) {
  const std::string job =
      "--model llama3-8b --cluster h100-sxm:8 --batch 48 --elastic ";
  const Outcome outcome = run(job + "1:4");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto lines = lines_of(outcome.out);
  ASSERT_GE(lines.size(), 5u);
  const auto row = [&](size_t i) { return lines[lines.size() - 4 + i]; };
  EXPECT_THAT(row(0), testing::StartsWith("  1        dp=1 "));
  EXPECT_THAT(row(1), testing::StartsWith("  2        tp=2 "));
  EXPECT_THAT(row(3), testing::StartsWith("  4        fsdp=4 "));
  const Outcome none =
      run("--model llama2-70b --cluster h100-sxm:8 --batch 48 --elastic 1:2");
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.out, HasSubstr("\n  2        nothing fits\n"));
  const Outcome json = run(job + "2:3 --json");
  EXPECT_THAT(
      json.out,
      AllOf(HasSubstr("\"value\": \"2\""), HasSubstr("\"value\": \"3\"")));
  EXPECT_THAT(
      run(job + "4:2").err,
      HasSubstr("the most devices come second, as in --elastic 2:4"));
  EXPECT_THAT(run(job + "2").err, HasSubstr("as in --elastic 2:8"));
  EXPECT_THAT(
      run(job + "2:9").err, HasSubstr("must be a whole number from 1 to 8"));
}

TEST_F(PlanCommand, TheLayoutsOfAJob) {
  const std::string digits = source_path("examples/configs/digits.toml") + " ";
  const Outcome outcome =
      run(digits + "--cluster h100-sxm:8 --layout fsdp=4 --elastic 3:8");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto lines = lines_of(outcome.out);
  ASSERT_EQ(lines.size(), 8u) << outcome.out;
  EXPECT_THAT(lines[0], testing::EndsWith("digits.toml, fsdp=4 at the start"));
  EXPECT_THAT(lines[3], testing::StartsWith("  4      fsdp=4 "));
  EXPECT_THAT(lines[4], testing::StartsWith("  5      nothing fits"));
  // Hosts of two ranks each.
  const json sizes = json::parse(
      run(digits + "--cluster h100-sxm:4x2 -n 2 --elastic 4:8 --json").out);
  EXPECT_EQ(sizes.at("sizes").size(), 3u);
  EXPECT_EQ(sizes.at("sizes")[2].at("text"), "dp=8");
  const std::pair<const char*, const char*> mistakes[] = {
      {"", "--elastic MIN:MAX is missing"},
      {"--elastic 1:2 --batch 8", "--batch with "},
      {"--elastic 1:2 --fix tp=2", "--fix with "},
      {"--elastic 3:8 -n 2", "give multiples of 2"}};
  for (const auto& [flags, rule] : mistakes) {
    const Outcome wrong = run(digits + flags);
    EXPECT_EQ(wrong.exit_code, 2);
    EXPECT_THAT(wrong.err, HasSubstr(rule));
  }
}

// The router of a run says how unevenly it spreads tokens, or a number does.
TEST_F(PlanCommand, ExpertsAreBusyAsARunMeasured) {
  const std::string model =
      "--model mixtral-8x7b --cluster h100-sxm:8 --batch 64 --fix ep=4 --json ";
  const auto seconds = [&](const std::string& load) {
    const Outcome outcome = run(model + load);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return json::parse(outcome.out)["plans"][0]["step_seconds"].get<double>();
  };
  const double even = seconds("");
  const double uneven = seconds("--expert-load 1.5");
  EXPECT_GT(uneven, 1.1 * even);
  EXPECT_LT(uneven, 1.5 * even);
  folder_.write(
      "run/metrics.jsonl",
      "{\"step\":1,\"epoch\":1,\"loss\":1,\"samples_per_second\":1,"
      "\"step_seconds\":1,\"data_seconds\":0,\"learning_rate\":1,"
      "\"expert_loads\":{\"a\":[3,3,2,2,2,2,1,1],\"b\":[1,1,2,2,2,2,3,3]}}\n");
  EXPECT_EQ(seconds("--expert-load " + folder_.path("run")), uneven);
  const std::string text =
      "--model mixtral-8x7b --cluster h100-sxm:8 "
      "--batch 64 --fix ep=4 --expert-load 1.5";
  EXPECT_THAT(
      run(text).out, HasSubstr("with ep=4, the busiest rank has 1.5 times"));
  const std::pair<std::string, std::string> wrong[] = {
      {model + "--expert-load 0.9", "--expert-load 0.9: the busiest rank has"},
      {model + "--expert-load nan", "the mean, which is 1, or more"},
      {model + "--expert-load nowhere", "is no number, and no run"},
      {model + "--expert-load " + folder_.path("empty"),
       "has measured no loads of experts"},
      {"--model mixtral-8x22b --cluster h100-sxm:8 --batch 64 --expert-load " +
           folder_.path("four"),
       "the run has 4 experts in a layer, and mixtral-8x22b has 8"},
      {kFits + "--expert-load 2", "llama3-8b has no experts; leave it out"}};
  folder_.write("empty/metrics.jsonl", "");
  folder_.write(
      "four/metrics.jsonl",
      "{\"step\":1,\"epoch\":1,\"loss\":1,\"samples_per_second\":1,"
      "\"step_seconds\":1,\"data_seconds\":0,\"learning_rate\":1,"
      "\"expert_loads\":{\"a\":[3,3,2,2]}}\n");
  for (const auto& [arguments, says] : wrong) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr(says));
  }
}

TEST_F(PlanCommand, LeavesEightPerCentFree) {
  const std::string job = "--model llama2-13b --cluster h100-sxm:8 --batch 64 ";
  const json usual = json::parse(run(job + "--json").out);
  const json full = json::parse(run(job + "--free 0 --json").out);
  const double usable = usual["usable_bytes"].get<double>();
  EXPECT_NEAR(usable, 0.92 * full["usable_bytes"].get<double>(), 1);
  EXPECT_LE(usual["plans"][0]["memory"]["peak_bytes"].get<double>(), usable);
  EXPECT_GT(full["plans"][0]["memory"]["peak_bytes"].get<double>(), usable);
  EXPECT_THAT(run(job).out, HasSubstr("8 % of each device's memory"));
  EXPECT_THAT(run(job + "--free 91").err, HasSubstr("--free 91"));
}

TEST_F(PlanCommand, NothingFitsNamesTheClosestAndWhatWouldDo) {
  const Outcome text = run(kLarge + "--html page.html");
  EXPECT_EQ(text.exit_code, 1);
  EXPECT_THAT(
      text.out, AllOf(
                    HasSubstr("Nothing fits"), HasSubstr("The closest plan"),
                    HasSubstr("such devices suffice")));
  EXPECT_THAT(
      read_file(folder_.path("page.html")),
      AllOf(HasSubstr("The closest plan"), HasSubstr("such devices suffice")));
  const json plan = json::parse(run(kLarge + "--json").out);
  EXPECT_TRUE(plan["plans"].empty());
  EXPECT_FALSE(plan["closest"]["fits"].get<bool>());
  EXPECT_TRUE(plan["smallest_cluster"]["fits"].get<bool>());
  EXPECT_THAT(plan["need"].get<std::string>(), HasSubstr("devices"));
}

}  // namespace echelon::plan_cli_test
