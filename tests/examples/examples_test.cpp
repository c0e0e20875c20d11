// The programs of examples/, as their first lines say to run them: losses are
// those of one rank, however many there are.
#include <gmock/gmock.h>

#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace echelon::examples_test {

using testing_support::Command;
using Words = std::vector<std::string>;

const std::string kPrograms = program("");

// Runs it, on its own without ranks; what it prints.
std::string output_of(int ranks, const Words& program) {
  Words words = program;
  words[0] = kPrograms + words[0];
  if (ranks > 0) {
    const Words run = {
        kPrograms + "echelon", "run", "-n", std::to_string(ranks), "--"};
    words.insert(words.begin(), run.begin(), run.end());
  }
  Command command(words, {"OMP_NUM_THREADS=1"});
  EXPECT_EQ(command.wait(), 0) << command.out() << command.err();
  return command.out();
}

std::vector<double> losses_in(const std::string& output) {
  static const std::regex kLoss("step +[0-9]+:? +loss ([0-9.]+)");
  std::vector<double> losses;
  for (std::sregex_iterator i(output.begin(), output.end(), kLoss), end;
       i != end; ++i) {
    losses.push_back(std::stod((*i)[1]));
  }
  return losses;
}

void expect_equal(
    const std::vector<double>& expected, const std::vector<double>& actual) {
  ASSERT_EQ(expected.size(), 3u);
  ASSERT_EQ(actual.size(), 3u);
  EXPECT_LT(expected[2], 0.5 * expected[0]);
  for (size_t i = 0; i < 3; ++i) {
    // Float32, its sums in another order; printed with 6 digits.
    EXPECT_NEAR(actual[i], expected[i], 1e-3 * expected[i] + 2e-6);
  }
}

// Errors leave main: World reports them, without the frames of LibTorch's.
TEST(Examples, AnErrorHasItsCodeAndOneLine) {
  Command command({kPrograms + "03_pipeline", "bogus"}, {"OMP_NUM_THREADS=1"});
  EXPECT_EQ(command.wait(), 2);
  EXPECT_THAT(
      command.err(), testing::MatchesRegex("error: [^\n]*bogus[^\n]*\n"));
}

// The launcher's last words are the rank's error, which shows it no second
// time.
TEST(Examples, ALaunchedProgramsErrorIsPrintedOnce) {
  Command command(
      {kPrograms + "echelon", "run", "-n", "1", "--", kPrograms + "03_pipeline",
       "bogus"},
      {"OMP_NUM_THREADS=1"});
  EXPECT_EQ(command.wait(), 2);
  const std::string text = command.out() + command.err();
  const size_t first = text.find("\"bogus\"");
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("\"bogus\"", first + 1), std::string::npos) << text;
}

TEST(Examples, DataParallel) {
  const auto losses = losses_in(output_of(2, {"01_data_parallel"}));
  ASSERT_EQ(losses.size(), 5u);
  EXPECT_LT(losses[4], losses[0]);
}

TEST(Examples, LayerList) {
  output_of(0, {"02_layer_list"});
}

TEST(Examples, Pipeline) {
  const auto one = losses_in(output_of(0, {"03_pipeline"}));
  expect_equal(one, losses_in(output_of(3, {"03_pipeline"})));
  expect_equal(one, losses_in(output_of(2, {"03_pipeline", "zb-h1"})));
}

TEST(Examples, TensorParallel) {
  const auto one = losses_in(output_of(0, {"04_tensor_parallel"}));
  for (const auto& [ranks, layout] :
       {std::pair{2, "tp=2"}, std::pair{4, "dp=2,tp=2"}}) {
    SCOPED_TRACE(layout);
    expect_equal(
        one, losses_in(output_of(ranks, {"04_tensor_parallel", layout})));
  }
}

TEST(Examples, Sharded) {
  const auto one = losses_in(output_of(0, {"05_sharded"}));
  expect_equal(one, losses_in(output_of(2, {"05_sharded"})));
  expect_equal(one, losses_in(output_of(4, {"05_sharded"})));
}

constexpr const char* kOwnModel = "06_own_model";

// Trains until `steps` steps are done; what it prints.
std::string train_until(
    const TempFolder& folder, int ranks, const std::string& run, int steps,
    const std::string& layout) {
  const std::string config = folder.write(
      run + ".toml", "[data]\nholdout = 0.0\n[train]\nbatch = 32\nsteps = " +
                         std::to_string(steps) + "\nrun = \"" +
                         folder.path(run) + "\"\n");
  return output_of(ranks, {kOwnModel, config, layout});
}

std::vector<double> losses_of_run(const std::string& run) {
  const std::string metrics = read_file(run + "/metrics.jsonl");
  static const std::regex kLoss("\"loss\":([0-9.]+)");
  std::vector<double> losses;
  for (std::sregex_iterator i(metrics.begin(), metrics.end(), kLoss), end;
       i != end; ++i) {
    losses.push_back(std::stod((*i)[1]));
  }
  return losses;
}

TEST(Examples, OwnModelResumesInEveryLayout) {
  const TempFolder folder;
  train_until(folder, 1, "one", 12, "dp=1");
  train_until(folder, 2, "two", 4, "dp=2");
  EXPECT_THAT(
      train_until(folder, 2, "two", 8, "pp=2"),
      testing::HasSubstr("saved with dp=2 on 2 ranks"));
  EXPECT_THAT(
      train_until(folder, 2, "two", 12, "fsdp=2"),
      testing::HasSubstr("saved with pp=2 on 2 ranks"));
  EXPECT_THAT(
      read_file(folder.path("two/config.toml")),
      testing::HasSubstr("fsdp = 2\n"));
  EXPECT_THAT(
      read_file(folder.path("two/report.html")), testing::HasSubstr("block.0"));

  const auto one = losses_of_run(folder.path("one"));
  const auto two = losses_of_run(folder.path("two"));
  ASSERT_EQ(one.size(), 12u);
  ASSERT_EQ(two.size(), 12u);
  EXPECT_LT(one[11], 0.95 * one[0]);
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_NEAR(two[i], one[i], 1e-4 * one[i]) << i;
  }
}

TEST(Examples, OwnModelEqualsOneDevice) {
  const TempFolder folder;
  const std::string config = folder.write(
      "own.toml", "[data]\nholdout = 0.0\n[train]\nbatch = 32\nsteps = 3\n");
  for (const char* layout : {"dp=2", "pp=2", "fsdp=2"}) {
    EXPECT_THAT(
        output_of(2, {kOwnModel, config, layout, "verify"}),
        testing::HasSubstr("equal: 63 comparisons over 3 steps"))
        << layout;
  }
}

}  // namespace echelon::examples_test
