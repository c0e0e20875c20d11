// Ranks as processes: the test program itself, once more for each rank.
//
//   TEST(Rank, Sums) {
//     if (!is_rank()) GTEST_SKIP() << kRunByOthers;
//     World world = World::from_environment(…); …
//   }
//   TEST(Processes, Sum) { run_as_ranks(2, "Rank.Sums", 1); }
//
// Programs that it starts are looked for beside the test program, so that a
// folder of tests can be taken to another machine.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace echelon::testing_support {

constexpr const char* kRunByOthers =
    "is run by the other tests of this program";

inline bool is_rank() {
  return std::getenv("ECHELON_TEST_RANK") != nullptr;
}

/// Runs `filter` of this program on `size` process ranks of one host; each must
/// pass `tests` tests. Link tests/support/process.cpp; needs launch_run built.
inline void run_as_ranks(
    int size, const std::string& filter, size_t tests,
    std::vector<std::string> environment = {}) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  environment.push_back("ECHELON_TEST_RANK=1");
  Command ranks(
      {(self.parent_path() / "launch_run").string(), "-n", std::to_string(size),
       "--plain", "--", self.string(), "--gtest_filter=" + filter,
       "--gtest_brief=1"},
      environment);
  EXPECT_EQ(ranks.wait(), 0) << ranks.out() << ranks.err();
  const std::string passed = "[  PASSED  ] " + std::to_string(tests) +
                             (tests == 1 ? " test." : " tests.");
  EXPECT_EQ(count(ranks.out(), passed), size) << ranks.out() << ranks.err();
}

}  // namespace echelon::testing_support
