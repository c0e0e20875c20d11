// Ranks that others start: Open MPI's mpirun and PyTorch's torchrun. CTest runs
// them as tests of their own, by filter.
#include <gmock/gmock.h>

#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/support/python.h"
#include "tests/support/test_hosts.h"

namespace echelon::launchers_test {

using testing_support::Command;
using Words = std::vector<std::string>;

/// The output of `size` ranks of launchers_rank, evenly on `num_nodes` hosts.
std::set<std::string>
lines_of(int size, const std::string& backend, int num_nodes = 1) {
  std::set<std::string> lines;
  const int local_size = size / num_nodes;
  const auto text = [](int number) { return std::to_string(number); };
  for (int rank = 0; rank < size; ++rank) {
    lines.insert(
        "rank " + text(rank) + " of " + text(size) + ", " +
        text(rank % local_size) + " of " + text(local_size) + " on node " +
        text(rank / local_size) + ", " + backend + ", sum " +
        text(size * (size + 1) / 2));
  }
  return lines;
}

void expect_lines(
    Words launcher, const std::string& backend,
    const std::set<std::string>& expected) {
  launcher.insert(launcher.end(), {test_program("launchers_rank"), backend});
  Command run(launcher);
  EXPECT_EQ(run.wait(), 0) << run.out() << run.err();
  std::set<std::string> lines;
  std::istringstream text(run.out());
  for (std::string line; std::getline(text, line);) lines.insert(line);
  EXPECT_EQ(lines, expected) << run.err();
  // The launcher's own daemons may outlive it by a moment.
  EXPECT_TRUE(Command::until([&] { return run.living().empty(); }));
}

void expect_ranks(const Words& launcher, int size, const std::string& backend) {
  expect_lines(launcher, backend, lines_of(size, backend));
}

bool is_installed(const std::string& program) {
  return Command({"sh", "-c", "command -v " + program}).wait() == 0;
}

constexpr const char* kNoMpirun =
    "needs mpirun (Debian package openmpi-bin): run `make extras` once";

// The launcher ends the strangers with the ranks.
TEST(Launched, StrangersKeepNoRankOut) {
  const testing_support::TempFolder folder;
  const auto strangers = folder.script(
      "strangers",
      "#!/usr/bin/env python3\n"
      "import os, socket, time\n"
      "first = [b'', os.urandom(100), b'ECHstor1' + bytes(32),\n"
      "         b'ECHstor1' + bytes(64)]\n"
      "held = []\n"
      "while True:\n"
      "    try:\n"
      "        held = held[-200:] + [socket.create_connection(\n"
      "            ('127.0.0.1', int(os.environ['MASTER_PORT'])))]\n"
      "        held[-1].sendall(first[len(held) % 4])\n"
      "    except OSError:\n"
      "        time.sleep(0.001)\n");
  const auto rank = folder.script(
      "rank", "#!/bin/sh\n[ $RANK = 1 ] && " + strangers + " &\nexec \"$@\"\n");
  for (const std::string backend : {"local", "gloo"}) {
    expect_ranks(
        {test_program("launch_run"), "-n", "3", "--plain", "--", rank}, 3,
        backend);
  }
}

class MpirunRanks : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!is_installed("mpirun")) GTEST_SKIP() << kNoMpirun;
  }
  static Words mpirun(int size) {
    return {
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-n",
        std::to_string(size)};
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, MpirunRanks, testing::Values(1, 2, 3));

TEST_P(MpirunRanks, StartsRanks) {
  expect_ranks(mpirun(GetParam()), GetParam(), "local");
}
TEST_P(MpirunRanks, StartsRanksOverGloo) {
  if (GetParam() == 1) return;  // one rank needs no backend
  expect_ranks(mpirun(GetParam()), GetParam(), "gloo");
}

// mpirun logs in to the other host through a program: here, one that enters it.
TEST(Mpirun, StartsRanksOnTestHosts) {
  if (!is_installed("mpirun")) GTEST_SKIP() << kNoMpirun;
  const testing_support::TestHosts hosts;
  if (!hosts.reason().empty()) GTEST_SKIP() << hosts.reason();
  std::string enter = "#!/bin/sh\nshift\nexec";
  for (const auto& word : hosts.on(1, {"sh", "-c"})) enter += " '" + word + "'";
  const testing_support::TempFolder folder;
  const auto agent = folder.script("agent", enter + " \"$*\"\n");
  const auto mpirun = hosts.on(
      0, {"mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", agent,
          "--host", hosts.address(0) + ":2," + hosts.address(1) + ":2", "-n",
          "4"});
  expect_lines(mpirun, "gloo", lines_of(4, "gloo", 2));
}

class Torchrun : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { ECHELON_NEED_PYTHON(); }
  static Words torchrun(int size, const Words& how) {
    const std::filesystem::path python = pytorch_python();
    Words words = {
        python.parent_path() / "torchrun", "--no-python", "--nproc-per-node",
        std::to_string(size)};
    words.insert(words.end(), how.begin(), how.end());
    return words;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Torchrun, testing::Values(1, 3));

// The agent serves the store, or rank 0 does: torchrun has both.
TEST_P(Torchrun, StartsRanksThatUseItsOwnStore) {
  expect_ranks(torchrun(GetParam(), {"--standalone"}), GetParam(), "local");
}
TEST_P(Torchrun, StartsRanksAtAPort) {
  const std::string port = std::to_string(testing_support::free_port());
  expect_ranks(
      torchrun(GetParam(), {"--master-port", port}), GetParam(), "local");
}
TEST_P(Torchrun, StartsRanksOverGloo) {
  if (GetParam() == 1) return;
  expect_ranks(torchrun(GetParam(), {"--standalone"}), GetParam(), "gloo");
}

}  // namespace echelon::launchers_test
