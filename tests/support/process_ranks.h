// Ranks as processes: a test program for each, or the test program itself, once
// more for each rank:
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

#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/places.h"
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

/// The same with each rank as a host of its own, on loopback. To NCCL too: it
/// refuses two ranks of one host on one GPU.
inline void run_as_hosts(
    int size, const std::string& filter, size_t tests,
    std::vector<std::string> environment = {}) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string port = std::to_string(free_port());
  environment.insert(
      environment.end(), {"ECHELON_TEST_RANK=1", "NCCL_SOCKET_IFNAME=lo"});
  std::vector<std::unique_ptr<Command>> hosts;
  for (int i = 0; i < size; ++i) {
    const std::string number = std::to_string(i);
    auto own = environment;
    own.push_back("NCCL_HOSTID=host-" + number);
    hosts.push_back(std::make_unique<Command>(
        std::vector<std::string>{
            (self.parent_path() / "launch_run").string(), "--nnodes",
            std::to_string(size), "--node-rank", number, "--master-addr",
            "127.0.0.1", "--master-port", port, "--plain", "--", self.string(),
            "--gtest_filter=" + filter, "--gtest_brief=1"},
        own));
  }
  const std::string passed = "[  PASSED  ] " + std::to_string(tests) +
                             (tests == 1 ? " test." : " tests.");
  for (const auto& host : hosts) {
    EXPECT_EQ(host->wait(), 0) << host->out() << host->err();
    EXPECT_EQ(count(host->out(), passed), 1) << host->out() << host->err();
  }
}

/// The command that runs `test` of the test program `name` on `size` process
/// ranks of one host.
inline std::vector<std::string>
on_ranks(const std::string& name, int size, const std::string& test) {
  return {
      test_program("launch_run"),
      "-n",
      std::to_string(size),
      "--plain",
      "--",
      test_program(name),
      "--gtest_filter=" + test};
}

inline void expect_ranks_pass(
    const std::string& name, int size, const std::string& test,
    const std::vector<std::string>& environment = {}) {
  Command run(on_ranks(name, size, test), environment);
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  EXPECT_EQ(count(run.out(), "[  PASSED  ] 1 test"), size);
}

/// Expects that `killed`, which kills itself in `test`, ends the job of three
/// ranks with its name. Returns what they wrote.
inline std::string expect_killed_rank_ends_job(
    const std::string& name, const std::string& test, int killed) {
  Command run(on_ranks(name, 3, test));
  EXPECT_EQ(run.wait(), 128 + 9);
  EXPECT_THAT(run.err(), testing::HasSubstr("rank " + std::to_string(killed)));
  EXPECT_TRUE(run.living().empty());
  return run.out() + run.err();
}

}  // namespace echelon::testing_support
