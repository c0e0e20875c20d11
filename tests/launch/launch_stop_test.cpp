// Signals to the launcher, stopped ranks, and the processes that remain when
// the launcher ends: none.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <thread>

#include "echelon/launch/signals.h"
#include "tests/launch/launched.h"

namespace echelon::testing_support::launch_stop_test {

using testing::HasSubstr;
using testing::StartsWith;

bool nothing_left(const Command& job) {
  return Command::until([&] { return job.living().empty(); });
}

std::string name_of(pid_t pid) {
  std::string name = read_file("/proc/" + std::to_string(pid) + "/comm");
  return name.substr(0, name.find('\n'));
}

/// The processes of a job that have the name of `program`: its guards and fork
/// server, which may run the same file, have others.
std::vector<pid_t> running(const Command& job, const std::string& program) {
  std::vector<pid_t> found;
  for (const pid_t pid : job.living()) {
    if (name_of(pid) == program) found.push_back(pid);
  }
  return found;
}

/// Whether the process runs; one that has ended and whose parent has not asked
/// for its exit code does not.
bool is_running(pid_t pid) {
  std::error_code gone;
  const std::string process = "/proc/" + std::to_string(pid);
  if (!std::filesystem::exists(process, gone)) return false;
  return read_file(process + "/status").find("State:\tZ") == std::string::npos;
}

pid_t parent_of(pid_t pid) {
  const std::string status =
      read_file("/proc/" + std::to_string(pid) + "/status");
  return std::stoi(status.substr(status.find("PPid:") + 5));
}

/// A shell that runs `handler` at `signals` and prints "ready".
std::vector<std::string>
trapping(const std::string& handler, const std::string& signals) {
  return {
      "sh", "-c",
      "trap '" + handler + "' " + signals +
          "; echo ready; while :; do sleep 0.05; done"};
}

/// Ends at SIGINT and SIGTERM as a trainer does: after its step, with 0.
std::vector<std::string> polite() {
  return trapping("echo ending; exit 0", "INT TERM HUP");
}

/// The exit code of a job whose ranks get the signal when they are ready.
int stopped_by(int signal, Command& job, int ranks) {
  EXPECT_TRUE(job.until_output("ready", ranks));
  job.signal(signal);
  return job.wait();
}

TEST(Stop, CtrlCLetsRanksEndCleanly) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Command job(launch({"-n", "3"}, polite()));
    EXPECT_EQ(stopped_by(signal, job, 3), 0) << job.err();
    EXPECT_EQ(count(job.out(), "ending"), 3);
    EXPECT_EQ(count(job.err(), "echelon:"), 0) << job.err();
    EXPECT_TRUE(job.living().empty());
  }
}

TEST(Stop, CtrlCThatRanksDoNotCatch) {
  Command job(launch({"-n", "3"}, rank_program({"wait"})));
  EXPECT_EQ(stopped_by(SIGINT, job, 3), 130);
  EXPECT_EQ(job.err_lines().back(), "echelon: stopped by SIGINT");
  EXPECT_TRUE(job.living().empty());
}

TEST(Stop, ALaterCtrlCKills) {
  Command job(launch(
      {"-n", "2", "--grace-ms", "100000"}, trapping("echo later", "INT TERM")));
  ASSERT_TRUE(job.until_output("ready", 2));
  job.signal(SIGINT);
  ASSERT_TRUE(job.until_output("later", 2));
  job.signal(SIGINT);  // the same stop
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  EXPECT_EQ(job.living().empty(), false);
  EXPECT_EQ(count(job.out(), "later"), 2);
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 130);
  EXPECT_TRUE(job.living().empty());
}

TEST(Stop, ARanksRequeueCodeIsKept) {
  Command job(launch({"-n", "2"}, trapping("exit 75", "TERM")));
  EXPECT_EQ(stopped_by(SIGTERM, job, 2), 75);
}

TEST(Stop, OneRankThatIsToldToStopIsNoFailure) {
  Command job(launch(
      {"-n", "3", "--max-restarts", "3"},
      {"sh", "-c",
       "trap 'exit 75' TERM; [ $RANK = 1 ] && kill -TERM $$; "
       "while :; do sleep 0.05; done"}));
  EXPECT_EQ(job.wait(), 75);
  EXPECT_EQ(
      job.err_lines().back(),
      "echelon: ranks were told to stop, not by this launcher; queue the job "
      "again");
  EXPECT_EQ(count(job.err(), "ended with"), 0) << job.err();
  EXPECT_TRUE(job.living().empty());
}

TEST(Stop, AnErrorWhileEndingIsReported) {
  Command job(launch(
      {"-n", "2", "--grace-ms", "200"},
      trapping(
          R"(if [ $RANK = 1 ]; then echo "{\"message\":\"disk full\",)"
          R"(\"type\":\"echelon::Error\",\"exit_code\":1,\"time_ns\":1,)"
          R"(\"rank\":1,\"consequence\":false}" > $ECHELON_ERROR_FILE; )"
          "exit 1; fi; exit 0",
          "INT")));
  EXPECT_EQ(stopped_by(SIGINT, job, 2), 1);
  EXPECT_EQ(job.err_lines().back(), "rank 1: disk full");
}

TEST(Stop, OtherSignalsAreForwarded) {
  Command job(launch({"-n", "2"}, trapping("echo got; exit 0", "USR1")));
  EXPECT_EQ(stopped_by(SIGUSR1, job, 2), 0);
  EXPECT_EQ(count(job.out(), "got"), 2);
}

TEST(Stop, CtrlZStopsAndContinuesTheRanks) {
  Command job(launch({"-n", "2"}, polite()));
  ASSERT_TRUE(job.until_output("ready", 2));
  job.signal(SIGTSTP);
  const auto stopped = [&] {
    int count = 0;
    for (const pid_t pid : job.living()) {
      count +=
          read_file("/proc/" + std::to_string(pid) + "/stat").find(") T ") !=
          std::string::npos;
    }
    return count;
  };
  EXPECT_TRUE(Command::until([&] { return stopped() >= 3; }));
  job.signal(SIGCONT);
  EXPECT_TRUE(Command::until([&] { return stopped() == 0; }));
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(job.err(), "");
}

TEST(Stop, AStoppedRankIsNamedAndCanStillBeEnded) {
  Command job(launch({"-n", "3"}, rank_program({"wait"})));
  ASSERT_TRUE(job.until_output("ready", 3));
  const auto ranks = running(job, "launch_rank");
  ASSERT_EQ(ranks.size(), 3u);
  kill(ranks[0], SIGSTOP);
  ASSERT_TRUE(Command::until([&] {
    return job.err().find(
               "was stopped by SIGSTOP; `kill -CONT " +
               std::to_string(ranks[0])) != std::string::npos;
  })) << job.err();
  kill(ranks[1], SIGSEGV);
  EXPECT_EQ(job.wait(), 139);
  EXPECT_TRUE(job.living().empty());
}

// As of a rank that hangs in the kernel, nothing is heard of its guard.
TEST(Stop, ARankThatCannotBeKilledDoesNotHoldTheLauncher) {
  Command job(launch({"-n", "2", "--grace-ms", "100"}, rank_program({"wait"})));
  ASSERT_TRUE(job.until_output("ready", 2));
  const auto ranks = running(job, "launch_rank");
  ASSERT_EQ(ranks.size(), 2u);
  const std::string stat =
      read_file("/proc/" + std::to_string(ranks[0]) + "/stat");
  const pid_t guard = std::stoi(stat.substr(stat.find(") ") + 4));
  ASSERT_EQ(name_of(guard), "echelon-guard");
  kill(guard, SIGSTOP);
  kill(ranks[1], SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  EXPECT_THAT(
      job.err(),
      HasSubstr(
          "(pid " + std::to_string(ranks[0]) + ") does not die of SIGKILL"));
}

TEST(Stop, AStoppedRankIsContinuedToEnd) {
  Command job(launch(
      {"-n", "2", "--grace-ms", "100000"},
      {"sh", "-c",
       "trap 'echo ended $RANK; exit 1' TERM; echo ready $RANK $$.; "
       "while :; do sleep 0.05; done"}));
  ASSERT_TRUE(job.until_output(".\n", 2));
  const auto pid_of = [&](int rank) {
    const std::string before = "ready " + std::to_string(rank) + " ";
    return std::stoi(job.out().substr(job.out().find(before) + before.size()));
  };
  kill(pid_of(0), SIGSTOP);
  ASSERT_TRUE(Command::until(
      [&] { return job.err().find("was stopped by") != std::string::npos; }));
  kill(pid_of(1), SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  EXPECT_THAT(job.out(), HasSubstr("ended 0"));
}

TEST(Stop, AReaderThatDoesNotReadBlocksNothing) {
  Command job(
      {"sh", "-c",
       std::string(test_program("launch_run")) +
           " -n 2 -- yes | { echo up; sleep 1000; }"});
  ASSERT_TRUE(job.until_output("up"));
  ASSERT_TRUE(Command::until([&] { return running(job, "yes").size() == 2; }));
  for (const pid_t pid : running(job, "launch_run")) {
    if (name_of(pid) != "echelon-guard") kill(pid, SIGTERM);
  }
  EXPECT_TRUE(
      Command::until([&] { return running(job, "launch_run").empty(); }));
  EXPECT_TRUE(running(job, "yes").empty());
}

// A user's wrapper: sets things up, then starts the real program as its child.
constexpr const char* kWrapper = "#!/bin/bash\n\"$@\" &\nwait $!\nexit $?\n";

/// The ranks by number, from /proc/PID/environ.
std::map<int, pid_t> ranks_of(const Command& job) {
  std::map<int, pid_t> ranks;
  for (const pid_t pid : running(job, "launch_rank")) {
    const std::string variables =
        read_file("/proc/" + std::to_string(pid) + "/environ");
    const std::string name = std::string(1, '\0') + "RANK=";
    const size_t at = variables.find(name);
    if (at == std::string::npos) continue;
    ranks[std::atoi(variables.c_str() + at + name.size())] = pid;
  }
  return ranks;
}

TEST(Stop, RanksStartAgainWithoutTheForkServer) {
  Command job(
      launch({"-n", "12", "--max-restarts", "1"}, rank_program({"wait"})));
  ASSERT_TRUE(job.until_output("ready", 12));
  const auto ranks = ranks_of(job);
  ASSERT_EQ(ranks.size(), 12u);
  EXPECT_EQ(ranks.rbegin()->first, 11);
  int servers = 0;
  for (const pid_t pid : job.living()) {
    if (name_of(pid) == "fork-server") {
      ++servers;
      kill(pid, SIGKILL);
    }
  }
  EXPECT_EQ(servers, std::getenv("ECHELON_TEST_FORKS") != nullptr ? 1 : 0);
  kill(ranks.at(1), SIGKILL);
  EXPECT_TRUE(job.until_output("ready", 24)) << job.err();
  EXPECT_EQ(ranks_of(job).size(), 12u);
  job.signal(SIGINT);
  job.wait();
  EXPECT_TRUE(job.living().empty());
}

// A fork of a process with threads may wait for a lock for ever.
TEST(Stop, AProgramWithThreadsBeforeMainIsNotForked) {
  Command job(
      launch({"-n", "2"}, rank_program({"wait"})),
      {"ECHELON_TEST_EARLY_THREAD=1"});
  ASSERT_TRUE(job.until_output("ready", 2)) << job.err();
  EXPECT_EQ(running(job, "fork-server").size(), 0u);
  EXPECT_EQ(running(job, "launch_rank").size(), 2u);
  job.signal(SIGINT);
  job.wait();
  EXPECT_TRUE(job.living().empty());
}

TEST(Orphans, NoneAfterSigkillOfTheLauncher) {
  TempFolder folder;
  const std::string wrapper = folder.script("wrapper", kWrapper);
  const std::vector<std::vector<std::string>> programs = {
      rank_program({"wait"}),
      rank_program({"ignore-term"}),
      {wrapper, test_program("launch_rank"), "ignore-term"},
      {wrapper, wrapper, test_program("launch_rank"), "wait"},
      // Detached: a session of its own, its parent gone.
      {"bash", "-c",
       std::string("setsid ") + test_program("launch_rank") +
           " ignore-term & disown; sleep 1000"},
  };
  for (const auto& program : programs) {
    TempFolder scratch;
    Command job(launch({"-n", "4"}, program), {"TMPDIR=" + scratch.path()});
    ASSERT_TRUE(job.until_output("ready", 4)) << job.err();
    job.signal(SIGKILL);
    EXPECT_EQ(job.wait(), 137);
    EXPECT_TRUE(nothing_left(job)) << program[0] << " " << program[1];
    EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  }
}

TEST(Orphans, NoneAfterSigkillOfTheLauncherWhileRanksStart) {
  for (int delay_us = 0; delay_us < 20000; delay_us += 2000) {
    Command job(launch({"-n", "8"}, {"sh", "-c", "sleep 1000 & sleep 1000"}));
    usleep(delay_us);
    job.signal(SIGKILL);
    EXPECT_EQ(job.wait(), 137);
    EXPECT_TRUE(nothing_left(job));
  }
}

// Both ranks fail by themselves; one's guard is told to end it when it has
// ended.
TEST(Stop, ALateOrderLosesNoReport) {
  Command job(launch({"-n", "2"}, rank_program({"throw-at-usr1"})));
  ASSERT_TRUE(job.until_output("ready", 2));
  const auto ranks = running(job, "launch_rank");
  ASSERT_EQ(ranks.size(), 2u);
  const pid_t late = parent_of(ranks[0]), other = parent_of(ranks[1]);
  ASSERT_EQ(name_of(late), "echelon-guard");
  const auto ended = [](pid_t pid) {
    return Command::until([&] { return !is_running(pid); });
  };
  kill(late, SIGSTOP);
  kill(ranks[0], SIGUSR1);
  ASSERT_TRUE(ended(ranks[0]));
  kill(ranks[1], SIGUSR1);
  ASSERT_TRUE(ended(ranks[1]));
  ASSERT_TRUE(ended(other));
  usleep(100'000);
  kill(late, SIGCONT);
  EXPECT_EQ(job.wait(), 2) << job.err();
  EXPECT_THAT(job.err(), HasSubstr(" ended with exit code 2"));
  EXPECT_TRUE(job.living().empty());
}

TEST(Orphans, NoneWhenARanksMainProcessEndsFirst) {
  Command job(
      launch({"-n", "2"}, {"sh", "-c", "setsid sleep 1000 & echo ready"}));
  EXPECT_EQ(job.wait(), 0);
  EXPECT_TRUE(job.living().empty());
}

TEST(Orphans, NoneWhenAGuardIsKilled) {
  Command job(launch(
      {"-n", "2"},
      {"sh", "-c", "sh -c 'echo ready; sleep 1000; echo' & wait"}));
  ASSERT_TRUE(job.until_output("ready", 2));
  const auto living = job.living();
  const auto guard = std::find_if(living.begin(), living.end(), [](pid_t pid) {
    return name_of(pid) == "echelon-guard";
  });
  ASSERT_NE(guard, living.end());
  kill(*guard, SIGKILL);
  EXPECT_EQ(job.wait(), 137) << job.err();
  EXPECT_THAT(job.err_lines().back(), HasSubstr("killed by SIGKILL"));
  EXPECT_TRUE(job.living().empty());
}

TEST(Orphans, NoneWhenLauncherAndGuardsAreKilledTogether) {
  Command job(launch({"-n", "3"}, rank_program({"ignore-term"})));
  ASSERT_TRUE(job.until_output("ready", 3));
  job.signal(SIGSTOP);  // it must not help
  for (const pid_t pid : job.living()) {
    if (name_of(pid) == "echelon-guard") kill(pid, SIGKILL);
  }
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 137);
  EXPECT_TRUE(nothing_left(job));
}

TEST(Orphans, NoneWhenTheRankIsKilledAboveAWrapper) {
  TempFolder folder;
  const std::string wrapper = folder.script("wrapper", kWrapper);
  Command job(
      launch({"-n", "2"}, {wrapper, test_program("launch_rank"), "kill", "1"}));
  EXPECT_EQ(job.wait(), 137);
  EXPECT_THAT(
      job.err_lines().back(),
      StartsWith("rank 1: exit code 137 (a shell's for SIGKILL)"));
  EXPECT_TRUE(job.living().empty());
}

// As when the other hosts have stopped a launcher before its own signal comes.
TEST(SignalFile, ASignalThatNobodyReadsKillsNobody) {
  const auto ends = [] {
    {
      const launch::SignalFile signals;
      ::raise(SIGTERM);
    }
    ::_exit(75);
  };
  EXPECT_EXIT(ends(), testing::ExitedWithCode(75), "");
}

}  // namespace echelon::testing_support::launch_stop_test
