// Whole jobs on one host: the environment of ranks, and reports of failures.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "echelon/launch/control.h"
#include "tests/launch/launched.h"
#include "tests/monitoring/http.h"

namespace echelon::testing_support::launch_run_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

/// The lines after the last that begins with "[".
std::vector<std::string> after_output(const Command& command) {
  std::vector<std::string> lines;
  for (const auto& line : command.err_lines()) {
    if (line.empty() || line[0] != '[') {
      lines.push_back(line);
    } else {
      lines.clear();
    }
  }
  return lines;
}

TEST(Run, EveryRankKnowsItsPlace) {
  Command job(launch(
      {"-n", "3"},
      {"sh", "-c",
       R"(echo "R=$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK $ROLE_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $ECHELON_GENERATION"; echo "J=$ECHELON_JOB $TORCHELASTIC_RUN_ID $MASTER_PORT"; echo "F=$ECHELON_MASTER_FD."; [ -n "$ECHELON_ERROR_FILE" ])"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  std::set<std::string> places;
  std::set<std::string> jobs;
  std::istringstream out(job.out());
  for (std::string line; std::getline(out, line);) {
    if (line.find("R=") != std::string::npos) places.insert(line);
    if (line.find("J=") != std::string::npos) jobs.insert(line.substr(4));
    if (line.find("F=") != std::string::npos) {
      EXPECT_EQ(line[1] == '0', line.substr(4) != "F=.") << line;
    }
  }
  EXPECT_THAT(
      places, ElementsAre(
                  "[0] R=0 0 3 3 0 1 0 3 127.0.0.1 0 0",
                  "[1] R=1 1 3 3 0 1 1 3 127.0.0.1 0 0",
                  "[2] R=2 2 3 3 0 1 2 3 127.0.0.1 0 0"));
  ASSERT_EQ(jobs.size(), 1u);
  const auto fields = words(*jobs.begin());  // of the job, the run, the port
  ASSERT_EQ(fields.size(), 3u);
  EXPECT_EQ(fields[0], "J=" + fields[1]);
  EXPECT_GT(std::stoi(fields[2]), 0);
}

/// Ranks of which number 1 is killed in each generation before `last`; the
/// others would take their time to end.
std::vector<std::string> killed_until(int last) {
  return {
      "sh", "-c",
      "trap '' TERM; echo generation $ECHELON_GENERATION "
      "$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS $ECHELON_JOB; "
      "[ $ECHELON_GENERATION -ge " +
          std::to_string(last) +
          " ] && exit 0; [ $RANK = 1 ] && kill -9 $$; "
          "while :; do sleep 0.05; done"};
}

TEST(Run, RanksStartAgainAfterAFailure) {
  TempFolder folder;
  Command job(launch(
      {"-n", "2", "--max-restarts", "3", "--log", folder.path()},
      killed_until(2)));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(
      job.err_lines(), ElementsAre(
                           StartsWith("echelon: rank 1 ended with SIGKILL"),
                           StartsWith("rank 1: killed by SIGKILL"),
                           "echelon: restart 1 of 3 (--max-restarts)",
                           StartsWith("echelon: rank 1 ended with SIGKILL"),
                           StartsWith("rank 1: killed by SIGKILL"),
                           "echelon: restart 2 of 3 (--max-restarts)"));
  EXPECT_TRUE(job.living().empty());
  // They have one job, and one log.
  const auto lines = words(read_file(folder.path() + "/rank-1.log"));
  ASSERT_EQ(lines.size(), 18u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(lines[6 * i + 1], std::to_string(i));
    EXPECT_EQ(lines[6 * i + 2], std::to_string(i));
    EXPECT_EQ(lines[6 * i + 4], "3");
    EXPECT_EQ(lines[6 * i + 5], lines[5]);
  }
}

TEST(Run, RestartsAreLimited) {
  Command job(launch(
      {"-n", "2", "--max-restarts", "1", "--grace-ms", "100"},
      killed_until(9)));
  EXPECT_EQ(job.wait(), 137);
  EXPECT_EQ(count(job.err(), "echelon: restart "), 1);
  Command exits(
      launch({"-n", "2", "--max-restarts", "5"}, {"sh", "-c", "exit 2"}));
  EXPECT_EQ(exits.wait(), 2);
  EXPECT_EQ(count(exits.err(), "echelon: restart "), 0);
}

TEST(Run, RestartsThatBringNoNewStepEnd) {
  TempFolder folder;
  const std::string step = folder.path() + "/step";
  Command job(launch(
      {"-n", "1", "--max-restarts", "50", "--last-step", step},
      {"sh", "-c",
       "[ $ECHELON_GENERATION -le 1 ] && echo "
       "4$ECHELON_GENERATION > " +
           step + "; exit 1"}));
  EXPECT_EQ(job.wait(), 93);
  EXPECT_EQ(count(job.err(), "from step 40"), 1);
  EXPECT_EQ(count(job.err(), "from step 41"), 3);
  EXPECT_EQ(
      last_line(job),
      "echelon: 3 restarts in a row brought no new step, so another one would "
      "not help");
}

// The driver's library is a stand-in: the second of its two GPUs is sick.
TEST(Run, ASickGpuIsToldAndALostOneEndsRestarts) {
  TempFolder folder;
  const std::string sick = folder.path() + "/sick";
  const auto fails = [&](const std::string& how, const std::string& visible) {
    auto words = launch(
        {"-n", "1", "--max-restarts", "2"},
        {"sh", "-c", "echo " + how + " > " + sick + "; exit 1"});
    words.insert(
        words.begin(),
        {"env", "LD_LIBRARY_PATH=" + test_program("fake_nvml"),
         "FAKE_NVML_SICK_FILE=" + sick, "CUDA_VISIBLE_DEVICES=" + visible});
    return words;
  };
  Command hot(fails("hot", "0,1"));
  EXPECT_EQ(hot.wait(), 1);
  EXPECT_EQ(
      count(
          hot.err(),
          "echelon: this host: GPU 1 is slowed down, because it is hot\n"
          "echelon: restart "),
      2);
  std::filesystem::remove(sick);
  Command lost(fails("lost", "0,1"));
  EXPECT_EQ(lost.wait(), 1);
  EXPECT_EQ(count(lost.err(), "echelon: restart "), 0);
  EXPECT_THAT(lost.err(), HasSubstr("echelon: this host: GPU 1 is lost, "));
  EXPECT_EQ(
      last_line(lost), "echelon: no restart: on this host it cannot help");
  // Before the start it is told too. A GPU that is not visible is another
  // job's.
  Command told(fails("lost", "1"));
  EXPECT_EQ(told.wait(), 1);
  EXPECT_THAT(told.err(), StartsWith("echelon: this host: GPU 1 is lost, "));
  Command other(fails("lost", "0"));
  EXPECT_EQ(other.wait(), 1);
  EXPECT_EQ(count(other.err(), "echelon: restart "), 2);
}

// A kill from outside is no failure of the program.
TEST(Run, KillsFromOutsideDoNotCount) {
  TempFolder folder;
  const std::string step = folder.path() + "/step";
  const auto job_of = [&](const std::string& end) {
    return launch(
        {"-n", "1", "--max-restarts", "1", "--last-step", step},
        {"sh", "-c",
         "echo 1$ECHELON_GENERATION > " + step +
             "; [ $ECHELON_GENERATION = 3 ] && exit 0; " + end});
  };
  Command killed(job_of("kill -9 $$"));
  EXPECT_EQ(killed.wait(), 0) << killed.err();
  EXPECT_THAT(
      last_line(killed),
      "echelon: restart 3 after a kill from outside, which --max-restarts does "
      "not count, from step 12");
  Command fails(job_of("exit 1"));
  EXPECT_EQ(fails.wait(), 1);
  EXPECT_EQ(count(fails.err(), "echelon: restart "), 1);
}

// Ranks that save when they are told to, and none of which starts where they
// are `bad`.
std::vector<std::string> resizable(int bad) {
  return {
      "sh", "-c",
      "[ $WORLD_SIZE = " + std::to_string(bad) +
          " ] && exit 2; trap 'exit 75' TERM; echo $RANK of $WORLD_SIZE; "
          "while :; do sleep 0.02; done"};
}

TEST(Run, AResizeStartsOtherRanks) {
  TempFolder folder;
  const std::string name = "echelon-resize-" + folder.path();
  Command job(launch({"-n", "2", "--control", name}, resizable(4)));
  ASSERT_TRUE(job.until_output(" of 2", 2)) << job.err();
  EXPECT_EQ(
      echelon::launch::ask_job(name, "resize 5"), "refused: 4 ranks at most");
  EXPECT_EQ(
      echelon::launch::ask_job(name, "resize 3"),
      "done: from 2 to 3 ranks, dp=3");
  ASSERT_TRUE(job.until_output(" of 3", 3)) << job.err();
  EXPECT_EQ(
      echelon::launch::ask_job(name, "status"), "ranks 3 generation 1 hosts 1");
  // 4 do not start, so the job goes on with 3.
  EXPECT_EQ(
      echelon::launch::ask_job(name, "resize 4"),
      "done: from 3 to 4 ranks, dp=4");
  ASSERT_TRUE(job.until_output(" of 3", 6)) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("ended with exit code 2"));
  EXPECT_EQ(last_line(job), "echelon: 3 ranks, dp=3");
  EXPECT_EQ(
      echelon::launch::ask_job(name, "pause"),
      "refused: unknown request \"pause\"");
  EXPECT_THAT(echelon::launch::ask_job(name, "stop"), StartsWith("done: "));
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_TRUE(job.living().empty());
}

// Who gives devices away names the new ones: the ranks see these, and the
// launcher looks at their health. The second GPU is lost.
TEST(Run, AResizeMayBringOtherDevices) {
  TempFolder folder;
  const std::string name = "echelon-resize-" + folder.path();
  const std::string sick = folder.path() + "/sick";
  std::ofstream(sick) << "lost\n";
  auto words = launch(
      {"-n", "1", "--max-restarts", "1", "--control", name},
      {"sh", "-c",
       "trap 'exit 75' TERM; echo $CUDA_VISIBLE_DEVICES, $SEEN of $WORLD_SIZE; "
       "[ $WORLD_SIZE = 3 ] && exit 1; while :; do sleep 0.02; done"});
  words.insert(
      words.begin(),
      {"env", "LD_LIBRARY_PATH=" + test_program("fake_nvml"),
       "FAKE_NVML_SICK_FILE=" + sick, "CUDA_VISIBLE_DEVICES=0", "SEEN=1"});
  Command job(words);
  ASSERT_TRUE(job.until_output("0, 1 of 1")) << job.err();
  EXPECT_THAT(
      echelon::launch::ask_job(name, "resize 2 CUDA_VISIBLE_DEVICES=0 SEEN=2"),
      StartsWith("done: "));
  ASSERT_TRUE(job.until_output("0, 2 of 2", 2)) << job.err();
  EXPECT_EQ(job.err().find("GPU 1 is lost"), std::string::npos);
  // These ranks fail, on devices of which one is lost: a restart cannot help,
  // and the job goes on with what it had.
  EXPECT_THAT(
      echelon::launch::ask_job(
          name, "resize 3 CUDA_VISIBLE_DEVICES=0,1,2 SEEN=3"),
      StartsWith("done: "));
  ASSERT_TRUE(job.until_output("0, 2 of 2", 4)) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("echelon: this host: GPU 1 is lost, "));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
}

TEST(Run, TheFiguresOfGpusAreThoseAfterAResize) {
  TempFolder folder;
  const std::string name = "echelon-resize-" + folder.path();
  const int port = free_port();
  auto words = launch(
      {"-n", "1", "--control", name, "--metrics", std::to_string(port)},
      {"sh", "-c",
       "trap 'exit 75' TERM; echo of $WORLD_SIZE; while :; do sleep 0.02; "
       "done"});
  words.insert(
      words.begin(), {"env", "LD_LIBRARY_PATH=" + test_program("fake_nvml"),
                      "CUDA_VISIBLE_DEVICES=1"});
  Command job(words);
  ASSERT_TRUE(job.until_output("of 1")) << job.err();
  const std::string power = "echelon_device_power_watts{";
  EXPECT_EQ(count(ask_page(port), power), 1);
  EXPECT_EQ(count(ask_page(port), "gpu=\"0\",UUID="), 0);
  EXPECT_THAT(
      echelon::launch::ask_job(name, "resize 2 CUDA_VISIBLE_DEVICES=0,1"),
      StartsWith("done: "));
  ASSERT_TRUE(job.until_output("of 2", 2)) << job.err();
  std::string page;  // a page is kept for a moment
  EXPECT_TRUE(Command::until([&] {
    page = ask_page(port);
    return count(page, power) == 2;
  })) << page;
  EXPECT_THAT(
      page, testing::ContainsRegex(
                "echelon_rank_device\\{run=\"[^\"]*\",rank=\"0\",Hostname="
                "\"[^\"]*\",gpu=\"0\"\\} 1\n"));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
}

TEST(Run, AStopDuringAResizeEndsTheJob) {
  TempFolder folder;
  const std::string name = "echelon-resize-" + folder.path();
  Command job(launch(
      {"-n", "2", "--control", name},
      {"sh", "-c",
       "trap 'echo saving; sleep 0.5; exit 75' TERM; echo of $WORLD_SIZE; "
       "while :; do sleep 0.02; done"}));
  ASSERT_TRUE(job.until_output("of 2", 2)) << job.err();
  EXPECT_THAT(echelon::launch::ask_job(name, "resize 3"), StartsWith("done: "));
  ASSERT_TRUE(job.until_output("saving", 2)) << job.err();
  EXPECT_THAT(
      echelon::launch::ask_job(name, "resize 4"),
      StartsWith("refused: the ranks are ending"));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_EQ(job.out().find("of 3"), std::string::npos);
}

TEST(Run, AStopBetweenTwoGenerationsEndsTheJob) {
  Command job(launch(
      {"-n", "2", "--max-restarts", "100000"},
      {"sh", "-c", "sleep 0.02; exit 1"}));
  ASSERT_TRUE(Command::until(
      [&] { return job.err().find("restart 3 of") != std::string::npos; }));
  job.signal(SIGTERM);
  // 1: the ranks had ended when it came.
  EXPECT_THAT(job.wait(), testing::AnyOf(130, 1));
  EXPECT_TRUE(job.living().empty());
}

/// A control group of 64 MiB, if this system lets us make one.
class SmallGroup {
 public:
  SmallGroup() {
    const std::string name = "echelon-test-" + std::to_string(getpid());
    for (const auto& [mount, limit] :
         {std::pair("/sys/fs/cgroup/memory/", "memory.limit_in_bytes"),
          std::pair("/sys/fs/cgroup/", "memory.max")}) {
      path_ = mount + name;
      if (rmdir(path_.c_str()), mkdir(path_.c_str(), 0755) != 0) continue;
      std::ofstream file(path_ + "/" + limit);
      if (file << (64 << 20) << std::flush) return;
      rmdir(path_.c_str());
    }
    path_.clear();
  }
  ~SmallGroup() {
    Command::until([&] {
      return path_.empty() || rmdir(path_.c_str()) == 0 || errno == ENOENT;
    });
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Run, AKillForLackOfMemoryIsTold) {
  const SmallGroup group;
  if (group.path().empty()) {
    GTEST_SKIP() << "this system lets us make no control group for memory";
  }
  const auto inside = [&](const std::string& rank) {
    auto words = launch({"-n", "2"}, {"sh", "-c", rank});
    words.insert(
        words.begin(),
        {"sh", "-c", "echo $$ > " + group.path() + "/cgroup.procs; exec \"$@\"",
         "sh"});
    return words;
  };
  // tail keeps the one line that never ends.
  Command full(inside("[ $RANK = 1 ] && exec tail /dev/zero; sleep 60"));
  EXPECT_EQ(full.wait(), 137);
  EXPECT_THAT(
      last_line(full),
      testing::AllOf(
          StartsWith("rank 1: killed by SIGKILL (Killed); the kernel did this "
                     "because memory ran out; this job's control group may "
                     "have 64 MiB and had "),
          HasSubstr("give it more memory, or start fewer ranks")));
  // One more try, and no third one.
  const auto twice = [&] {
    auto words = inside("[ $RANK = 1 ] && exec tail /dev/zero; sleep 60");
    const auto ranks = std::ranges::find(words, "2");
    words.insert(ranks + 1, {"--max-restarts", "9"});
    return words;
  }();
  Command again(twice);
  EXPECT_EQ(again.wait(), 137);
  EXPECT_EQ(
      count(again.err(), "echelon: restart 1 of 1 after memory ran out"), 1);
  EXPECT_EQ(count(again.err(), "echelon: restart "), 1);
  EXPECT_THAT(last_line(again), HasSubstr("memory ran out before"));
  Command killed(inside("[ $RANK = 1 ] && kill -9 $$; sleep 60"));
  EXPECT_EQ(killed.wait(), 137);
  EXPECT_EQ(last_line(killed), "rank 1: killed by SIGKILL (Killed)");
}

TEST(Run, ALogThatMayNotGrowEndsTheLogAndNotTheJob) {
  TempFolder folder;
  std::vector<std::string> words = {
      "bash", "-c", "ulimit -f 4; exec \"$@\"", "bash"};
  const auto launched = launch(
      {"-n", "1", "--log", folder.path()},
      {"sh", "-c",
       "for i in $(seq 300); do echo 0123456789012345678901234567890123456789; "
       "done"});
  words.insert(words.end(), launched.begin(), launched.end());
  Command limited(words);
  EXPECT_EQ(limited.wait(), 0);
  EXPECT_THAT(limited.err(), HasSubstr("ends early: File too large"));
}

/// A job whose ranks fail.
struct Failure {
  const char* name;
  const char* options;
  const char* rank;  // the arguments of launch_rank
  int exit_code;
  testing::Matcher<std::string> last_line;
  testing::Matcher<std::string> line_before = testing::_;
};

void PrintTo(const Failure& failure, std::ostream* out) {
  *out << failure.name;
}

void expect_failure(
    const std::vector<std::string>& command, const Failure& failure) {
  Command job(command);
  EXPECT_EQ(job.wait(), failure.exit_code);
  const auto last = after_output(job);
  ASSERT_EQ(last.size(), 2u) << job.err();
  EXPECT_THAT(last[0], failure.line_before);
  EXPECT_THAT(last[1], failure.last_line);
  EXPECT_TRUE(job.living().empty());
}

class Failures : public testing::TestWithParam<Failure> {};

TEST_P(Failures, AreTheLastThingPrinted) {
  const auto& failure = GetParam();
  expect_failure(
      launch(words(failure.options), rank_program(words(failure.rank))),
      failure);
}

TEST(Run, APythonTracebackIsTheLastThingPrinted) {
  expect_failure(
      launch(
          {"-n", "2"},
          {"python3", "-c",
           "import os, time\n"
           "if os.environ['RANK'] == '1': raise ValueError('no column')\n"
           "time.sleep(1000)"}),
      {"", "", "", 1, "rank 1: ValueError: no column"});
}

const Failure kFailures[] = {
    {"UncaughtException", "-n 4", "throw 2", 1,
     "rank 2: std::runtime_error: batch 7 does not fit",
     "echelon: rank 2 ended with exit code 1; the other 3 were stopped"},
    {"UncaughtExceptionWithoutReporter", "-n 2", "throw-bare 1", 134,
     "rank 1: std::runtime_error: batch 7 does not fit",
     StartsWith("echelon: rank 1 ended with SIGABRT")},
    {"ExitCodeOfAnErrorType", "-n 2", "config 0", 2,
     "rank 0: [layout] dp=3, but 4 ranks"},
    {"ExitCodeAlone", "-n 3", "exit 1 42", 42, "rank 1: exit code 42"},
    {"Segv", "-n 2", "segv 1", 139,
     StartsWith("rank 1: killed by SIGSEGV (Segmentation fault)")},
    {"Kill", "-n 2", "kill 0", 137,
     StartsWith("rank 0: killed by SIGKILL (Killed)")},
    {"ALostPeerIsNotTheCause", "-n 3", "lost 1", 137,
     StartsWith("rank 1: killed by SIGKILL")},
    {"RanksThatIgnoreSigtermAreKilled", "-n 3 --grace-ms 100",
     "ignore-term 1 5", 5, "rank 1: exit code 5"}};

INSTANTIATE_TEST_SUITE_P(
    Run, Failures, testing::ValuesIn(kFailures),
    [](const auto& info) { return info.param.name; });

TEST(Run, LogsHoldAllOutputOfARank) {
  TempFolder folder;
  const std::string logs = folder.path() + "/deep/log";
  Command job(launch(
      {"-n", "2", "--log", logs}, {"sh", "-c",
                                   "echo out $RANK; echo err $RANK >&2; printf "
                                   "'end\\001'"}));
  EXPECT_EQ(job.wait(), 0);
  for (const std::string rank : {"0", "1"}) {
    const std::string log = read_file(logs + "/rank-" + rank + ".log");
    EXPECT_EQ(count(log, "out " + rank + "\n"), 1) << log;
    EXPECT_EQ(count(log, "err " + rank + "\n"), 1) << log;
    EXPECT_EQ(count(log, "end\001"), 1) << log;
    EXPECT_EQ(log.size(), 16u);
  }
  EXPECT_THAT(job.out(), HasSubstr("[1] out 1\n"));
  EXPECT_THAT(job.err(), HasSubstr("[0] err 0\n"));
}

TEST(Run, AFullDiskEndsTheLogAndNotTheJob) {
  TempFolder folder;
  std::filesystem::create_symlink("/dev/full", folder.path() + "/rank-1.log");
  Command job(launch({"-n", "2", "--log", folder.path()}, {"echo", "line"}));
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(count(job.out(), "line\n"), 2);
  EXPECT_THAT(job.err(), HasSubstr("rank-1.log ends early: No space left"));
  EXPECT_EQ(read_file(folder.path() + "/rank-0.log"), "line\n");
}

TEST(Run, AFloodOfOutputIsKept) {
  TempFolder folder;
  const int lines = 500000;  // 100 MB
  Command job(launch(
      {"-n", "2", "--log", folder.path()},
      rank_program({"flood", std::to_string(lines)})));
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(after_output(job).back(), HasSubstr("the last words"));
  const auto one = [&](const std::string& rank) {
    const std::string log = read_file(folder.path() + "/rank-" + rank + ".log");
    return count(log, "x\n") == lines && count(log, "the last words\n") == 1;
  };
  EXPECT_TRUE(one("0") || one("1"));  // the other one may have been stopped
}

TEST(Run, BinaryOutputAndLongLines) {
  TempFolder folder;
  Command job(launch(
      {"-n", "2", "--log", folder.path()},
      {"sh", "-c",
       "head -c 3000000 /dev/zero; head -c 1000000 "
       "/dev/urandom >&2; echo; echo done"}));
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(count(job.out(), "] done\n"), 2);
  EXPECT_EQ(
      std::filesystem::file_size(folder.path() + "/rank-1.log"), 4000006u);
}

TEST(Run, PlainOutputIsUnchanged) {
  Command job(launch({"-n", "1", "--plain"}, {"printf", "a\\rb\\001c"}));
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(job.out(), "a\rb\001c");
}

TEST(Run, RankZeroAloneOnTheTerminal) {
  TempFolder folder;
  Command job(launch(
      {"-n", "2", "--rank-zero", "--log", folder.path()},
      {"sh", "-c", "printf \"10%%\\r$RANK\"; echo e$RANK >&2"}));
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(job.out(), "10%\r0");
  EXPECT_EQ(job.err(), "e0\n");
  EXPECT_EQ(read_file(folder.path() + "/rank-0.log"), "e0\n");
  const std::string other = read_file(folder.path() + "/rank-1.log");
  EXPECT_EQ(count(other, "10%\r1") + count(other, "e1\n"), 2) << other;
}

TEST(Run, StandardInputGoesToRankZero) {
  Command job(
      {"sh", "-c",
       std::string("echo question | ") + test_program("launch_run") +
           " -n 2 -- cat"});
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(job.out(), "[0] question\n");
}

TEST(Run, AReaderThatLeavesEndsTheJob) {
  Command job(
      {"sh", "-c",
       std::string(test_program("launch_run")) + " -n 2 -- yes | head -n 1"});
  EXPECT_EQ(job.wait(), 0);
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST(Run, StartingFailsBeforeAnyRank) {
  TempFolder folder;
  const struct {
    const char* options;
    std::string program;
    const char* text;
  } cases[] = {
      {"-n 2", "./no-such-program", "./no-such-program"},
      {"-n 0", "true", "-n 0"},
      {"-n -2", "true", "-n -2"},
      {"-n 9999", "true", "1 to 1024"},
      {"-n 2", folder.path(), "folder"},
      {"-n 2", folder.script("text", "no first line\n"), "#!"},
      {"-n 2 --log /dev/null/x", "true", "/dev/null/x"},
      {"-n 1 --master-addr 192.0.2.77", "true", "not an address of this host"},
      {"-n 1 --master-addr no-such-host.invalid", "true",
       "no-such-host.invalid"}};
  for (const auto& [options, program, text] : cases) {
    Command job(launch(words(options), {program}));
    EXPECT_EQ(job.wait(), 2) << job.err();
    EXPECT_EQ(job.out(), "");
    EXPECT_EQ(job.err_lines().size(), 1u) << job.err();
    EXPECT_THAT(job.err(), HasSubstr(text));
  }
}

TEST(Run, AMissingLibraryIsOneClearError) {
  TempFolder folder;
  const std::string script = folder.script(
      "program",
      "#!/bin/sh\necho './p: error while loading shared libraries: "
      "libx.so.1: cannot open shared object file: No such file or "
      "directory' >&2\nexit 127\n");
  Command job(launch({"-n", "2"}, {script}));
  EXPECT_EQ(job.wait(), 2);
  EXPECT_THAT(job.err(), HasSubstr("libx.so.1"));
  EXPECT_THAT(job.err_lines().back(), HasSubstr("LD_LIBRARY_PATH"));
}

TEST(Run, TooFewProcessesAllowed) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "needs root: a user without processes is made up";
  }
  // A user id of its own: the limit counts the user's other processes too.
  TempFolder folder;
  const std::string program = folder.path() + "/run";
  std::filesystem::copy_file(test_program("launch_run"), program);
  std::filesystem::permissions(folder.path(), std::filesystem::perms(0755));
  Command job(
      {"setpriv", "--reuid", std::to_string(100000 + getpid()),
       "--clear-groups", "prlimit", "--nproc=6", program, "-n", "8", "--",
       "sleep", "1000"},
      {"TMPDIR=/tmp"});
  EXPECT_EQ(job.wait(), 2) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("ulimit -u"));
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST(Run, TwoJobsAtATimeDoNotMix) {
  Command a(launch({"-n", "4"}, rank_program({"meet"})));
  Command b(launch({"-n", "3"}, rank_program({"meet"})));
  EXPECT_EQ(a.wait(), 0) << a.err();
  EXPECT_EQ(b.wait(), 0) << b.err();
  EXPECT_EQ(count(a.out(), "sum 6\n"), 4) << a.out();
  EXPECT_EQ(count(b.out(), "sum 3\n"), 3) << b.out();
}

TEST(Run, APortHasOneJob) {
  Command a(
      launch({"-n", "1"}, {"sh", "-c", "echo port $MASTER_PORT.; sleep 1000"}));
  ASSERT_TRUE(a.until_output(".\n"));
  const std::string port = a.out().substr(9, a.out().find('.') - 9);
  Command b(launch({"-n", "1", "--master-port", port}, {"true"}));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(b.err(), HasSubstr("port " + port + ": the port is in use"));
}

TEST(Run, TheStoreListensOnLoopbackAlone) {
  Command job(launch({"-n", "2"}, rank_program({"listen"})));
  ASSERT_TRUE(job.until_output("listening"));
  // The rank's socket by its inode, in every table of listening sockets.
  std::set<std::string> inodes;
  for (const pid_t pid : job.living()) {
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator(
             "/proc/" + std::to_string(pid) + "/fd", gone)) {
      const std::string to =
          std::filesystem::read_symlink(entry.path(), gone).string();
      if (to.rfind("socket:[", 0) == 0) {
        inodes.insert(to.substr(8, to.size() - 9));
      }
    }
  }
  int listening = 0;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::istringstream lines(read_file(table));
    for (std::string line; std::getline(lines, line);) {
      const auto fields = words(line);
      if (fields.size() > 9 && fields[3] == "0A" &&
          inodes.contains(fields[9])) {
        ++listening;
        EXPECT_THAT(fields[1], StartsWith("0100007F:")) << line;
      }
    }
  }
  EXPECT_EQ(listening, 1);
}

TEST(Run, OneHostAlwaysUsesLoopback) {
  Command job(launch(
      {"-n", "1", "--master-addr", "0.0.0.0"},
      {"sh", "-c", "echo $MASTER_ADDR"}));
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(job.out(), "[0] 127.0.0.1\n");
}

TEST(Run, PythonsStoreCanOpenTheMasterPort) {
  // Rank 0 listens on MASTER_PORT of all interfaces, as torch.distributed does.
  Command job(launch({"-n", "2"}, {"python3", "-c", R"(
import os, socket, time
port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    door = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    link, _ = door.accept()
    print("got", link.recv(1))
else:
    while True:
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], port)).send(b"x")
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
)"}));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[0] got b'x'"));
}

TEST(Run, ScratchFilesAreRemoved) {
  TempFolder folder;
  Command job(
      launch({"-n", "2"}, rank_program({"throw", "0"})),
      {"TMPDIR=" + folder.path()});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace echelon::testing_support::launch_run_test
