#include "echelon/checkpoint/remote/remote_index.h"

#include <gmock/gmock.h>

#include <cmath>

namespace echelon::remote_index_test {

using testing::ElementsAre;

std::vector<int64_t> steps(const RemoteIndex& index) {
  std::vector<int64_t> all;
  for (const auto& one : index.checkpoints) all.push_back(one.step);
  return all;
}

RemoteCheckpoint at(int64_t step, std::optional<double> metric = {}) {
  return {remote_name(step, "1f3ac27b", step), step, metric};
}

TEST(RemoteIndex, IsReadAsItWasWritten) {
  const RemoteIndex index{
      .checkpoints = {at(40, 0.1), at(20), at(123456789, -1e-9)},
      .writer = "1f3ac27b process 1 on host a"};
  EXPECT_EQ(
      to_text({.checkpoints = {at(40, 0.25)}, .writer = "w"}),
      "step-00000040-1f3ac27b-40 0.25\nwriter w\n");
  const auto read = parse_remote_index(to_text(index));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->checkpoints, index.checkpoints);
  EXPECT_EQ(read->writer, index.writer);
}

TEST(RemoteIndex, OtherTextsAreRefused) {
  for (const char* text :
       {"", "step-00000040\n", "writer w", "step-00000040-1f3ac27b-1\n",
        "step-00000040-1f3ac27b-1 x\nwriter w\n",
        "step-00000040-1f3ac27b-1 \nwriter w\n",
        "step-40-1f3ac27b-1\nwriter w\n",
        "step-00000040-1F3ac27b-1\nwriter w\n",
        "step-00000040-1f3ac27b-\nwriter w\n", "writer w\nwriter w\n",
        "writer w\nstep-00000040-1f3ac27b-1\n"}) {
    EXPECT_FALSE(parse_remote_index(text)) << text;
  }
  for (const char* name :
       {"", "step-00000040", "-", "1f3ac27b-1", "step-00000040-1f3ac27b",
        "a/step-00000040-1f3ac27b-1"}) {
    EXPECT_FALSE(step_of_remote(name)) << name;
  }
}

using Losses = std::vector<std::pair<int64_t, double>>;

TEST(RemoteIndex, KeepsTheNewestAndTheBest) {
  const KeepRule rule{.newest = 2, .best = "loss"};
  RemoteIndex index;
  for (const auto& [step, loss] :
       Losses{{1, 0.3}, {2, 0.1}, {3, 0.2}, {4, 0.1}, {5, 0.4}, {6, NAN}}) {
    add(index, at(step, loss), rule);
  }
  EXPECT_THAT(steps(index), ElementsAre(6, 5, 4));
  RemoteIndex largest;
  for (const auto& [step, accuracy] :
       Losses{{1, 0.3}, {2, 0.9}, {3, 0.2}, {4, 0.1}}) {
    add(largest, at(step, accuracy),
        {.newest = 2, .best = "eval_accuracy", .best_is_largest = true});
  }
  EXPECT_THAT(steps(largest), ElementsAre(4, 3, 2));
}

}  // namespace echelon::remote_index_test
