// The programs of examples/, as their first lines say to run them: losses are
// those of one rank, however many there are.
#include <gmock/gmock.h>

#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

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

}  // namespace echelon::examples_test
