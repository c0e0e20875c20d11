// Our schedules against those of torch.distributed.pipelining, through CSV
// files in both directions.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>

#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"
#include "echelon/schedule/memory.h"
#include "echelon/schedule/options.h"
#include "echelon/schedule/timing.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::schedule_pytorch_test {

namespace fs = std::filesystem;

const std::map<std::string, std::string> kOurNames = {
    {"GPipe", "gpipe"},
    {"Interleaved1F1B", "interleaved"},
    {"LoopedBFS", "breadth_first"},
    {"InterleavedZeroBubble", "zb-h1"},
    {"ZBVZeroBubble", "zb-v"},
    {"DualPipeV", "dualpipev"}};

TEST(SchedulePytorch, TheirsAreValidHereAndTheSameAsOurs) {
  ECHELON_NEED_PYTHON();
  const TempFolder folder;
  run_python_script("schedule/reference.py", {"export", folder.path()});
  const std::regex name("(\\w+)\\.p(\\d+)\\.m(\\d+)\\.v(\\d+)\\.csv");
  std::map<std::string, int> seen;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    std::smatch parts;
    const std::string file = entry.path().filename().string();
    ASSERT_TRUE(std::regex_match(file, parts, name)) << file;
    const auto theirs = read_schedule_csv(entry.path().string());
    EXPECT_NO_THROW(check(theirs)) << file;
    auto ours = make_schedule(
        {schedule_kind(kOurNames.at(parts[1])), std::stoi(parts[2]),
         std::stoi(parts[3]), std::stoi(parts[4])});
    ours.name = theirs.name;
    if (parts[1] == "LoopedBFS") {
      // PyTorch's backwards begin with the last microbatch.
      EXPECT_EQ(
          stored_activations(ours).stages, stored_activations(theirs).stages);
      EXPECT_EQ(time_schedule(ours).makespan, time_schedule(theirs).makespan)
          << file;
    } else {
      EXPECT_EQ(ours, theirs) << file;
    }
    ++seen[parts[1]];
  }
  EXPECT_EQ(seen.size(), kOurNames.size());
  for (const auto& [kind, number] : seen) EXPECT_GE(number, 20) << kind;
}

TEST(SchedulePytorch, OursLoadThere) {
  ECHELON_NEED_PYTHON();
  const TempFolder folder;
  int written = 0;
  for (const ScheduleKind kind : kScheduleKinds) {
    for (const int32_t ranks : {1, 2, 3, 5}) {
      for (const int32_t microbatches : {1, 2, 7, 11}) {
        if (kind == ScheduleKind::dualpipev && microbatches < 2 * ranks)
          continue;
        const auto schedule = make_schedule({kind, ranks, microbatches, 0});
        std::ofstream file(folder.path(
            to_string(kind) + ".p" + std::to_string(ranks) + ".m" +
            std::to_string(microbatches) + ".v" +
            std::to_string(stages_per_rank_of(kind)) + ".csv"));
        write_schedule_csv(schedule, file);
        ++written;
      }
    }
  }
  EXPECT_EQ(
      run_python_script("schedule/reference.py", {"load", folder.path()}),
      std::to_string(written) + "\n");
}

}  // namespace echelon::schedule_pytorch_test
