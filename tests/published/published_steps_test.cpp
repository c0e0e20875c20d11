// The program published_steps, as it is typed.
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/typed.h"
#include "tests/support/places.h"

namespace echelon::published_steps_test {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

class PublishedSteps : public testing::Test {
 protected:
  Outcome run(const std::string& arguments) {
    return typed(
        folder_, arguments, "", program("../benchmarks/published_steps"));
  }

  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_.path(name)) << text;
  }

  void refuses(
      const std::string& arguments, int exit_code,
      const testing::Matcher<const std::string&>& says) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, exit_code) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_THAT(outcome.err, says) << arguments;
  }

  TempFolder folder_;
};

const char* const kTable =
    "gpu,gpus,model,seq,global_batch,tp,pp,step_seconds\n"
    "A100-SXM-80GB,8,gpt2,1024,64,1,1,0.2\n";

TEST_F(PublishedSteps, PredictsTables) {
  write(
      "steps.csv", std::string(kTable) + "X9000,8,gpt2,1024,64,1,1,0.2\n" +
                       "A100-SXM-80GB,8,gpt2,1024,many,1,1,0.2\n");
  const Outcome text = run("steps.csv");
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_THAT(
      text.out, AllOf(
                    HasSubstr("mean error"), HasSubstr("not predicted"),
                    HasSubstr("X9000")));
  const Outcome outcome = run("steps.csv --json");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const json printed = json::parse(outcome.out);
  ASSERT_EQ(printed["rows"].size(), 3u);
  EXPECT_GT(printed["rows"][0]["step_seconds"].get<double>(), 0);
  EXPECT_GT(printed["rows"][0]["memory_gib"].get<double>(), 0);
  EXPECT_TRUE(printed["rows"][1]["step_seconds"].is_null());
  EXPECT_THAT(
      printed["rows"][1]["excluded"].get<std::string>(), HasSubstr("X9000"));
  EXPECT_THAT(
      printed["rows"][2]["excluded"].get<std::string>(),
      HasSubstr("global_batch \"many\""));
}

TEST_F(PublishedSteps, RefusesTablesThatAreNone) {
  refuses("nowhere.csv", 3, HasSubstr("nowhere.csv"));
  write("empty.csv", "");
  refuses("empty.csv", 3, HasSubstr("empty.csv"));
  write("column.csv", "gpu,gpus,model,seq\nA100-SXM-80GB,8,gpt2,1024\n");
  refuses(
      "column.csv", 3,
      AllOf(HasSubstr("column.csv:1"), HasSubstr("no column global_batch")));
  write("short.csv", std::string(kTable) + "A100-SXM-80GB,8,gpt2\n");
  refuses("short.csv", 3, HasSubstr("short.csv:3: 3 cells"));
  write("quote.csv", std::string(kTable) + "\"A100,8\n");
  refuses("quote.csv", 3, HasSubstr("quote.csv"));
  write("steps.csv", kTable);
  refuses("steps.csv other.csv", 2, HasSubstr("other.csv"));
  refuses("steps.csv --planned", 2, HasSubstr("usage"));
  refuses("", 2, HasSubstr("usage"));
}

}  // namespace echelon::published_steps_test
