// What a daemon that is killed leaves behind, and what the next one makes of
// it.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <thread>

#include "tests/pool/pool_server.h"

namespace echelon::pool::pool_daemon_test {

class PoolDaemon : public PoolServer {};

TEST_F(PoolDaemon, JobsOutliveItAndAreAdopted) {
  start();
  const int64_t id = submit(
      {"--project", "language", "-n", "2"},
      "echo begins >>" + path("runs") + "; while [ ! -e " + path("go") +
          " ]; do sleep 0.05; done; exit 4");
  ASSERT_TRUE(appears("runs"));
  replace_daemon();
  EXPECT_EQ(state(id), "running");
  EXPECT_EQ(job(id)["devices"], 2);
  std::ofstream(path("go")) << "\n";
  ASSERT_TRUE(reaches(id, "failed"));
  EXPECT_EQ(job(id)["exit_code"], 4);
  EXPECT_EQ(text_of("runs"), "begins\n");
}

TEST_F(PoolDaemon, AJobThatEndsMeanwhileHasItsExitCode) {
  start();
  const int64_t id = submit(
      {"--project", "language"},
      "touch " + path("runs") + "; while [ ! -e " + path("go") +
          " ]; do sleep 0.05; done; touch " + path("ended"));
  ASSERT_TRUE(appears("runs"));
  daemon_->signal(SIGKILL);
  daemon_->wait();
  std::ofstream(path("go")) << "\n";
  ASSERT_TRUE(appears("ended"));
  daemon_ = std::make_unique<Command>(daemon());
  ASSERT_TRUE(daemon_->until_output("echelon pool:"));
  ASSERT_TRUE(reaches(id, "done"));
}

// A job's environment may hold secrets. Its output is as other files are.
TEST_F(PoolDaemon, OtherUsersReadNoEnvironment) {
  namespace fs = std::filesystem;
  start();
  const int64_t id = submit(
      {"--project", "language"}, "touch " + path("seen") + "; echo shown");
  ASSERT_TRUE(reaches(id, "done"));
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(path("pool"))) {
    if (!entry.is_regular_file()) continue;
    ++files;
    const bool output = entry.path().filename() == "output";
    EXPECT_EQ(
        (entry.status().permissions() & fs::perms::others_read) !=
            fs::perms::none,
        output)
        << entry.path();
  }
  EXPECT_GE(files, 5);
  EXPECT_NE(
      fs::status(path("seen")).permissions() & fs::perms::others_read,
      fs::perms::none);
}

// What was being stopped is stopped by the next one.
TEST_F(PoolDaemon, ACancelledJobEnds) {
  start();
  const int64_t id = submit(
      {"--project", "language"}, "trap '' TERM; touch " + path("runs") +
                                     "; while true; do sleep 0.05; done");
  ASSERT_TRUE(appears("runs"));
  ask({"cancel", std::to_string(id)});
  replace_daemon();
  ASSERT_TRUE(reaches(id, "cancelled"));
}

// Submitters, and a daemon that dies at any moment: each job runs once, on
// devices that nobody else has, and no project passes its limit.
TEST_F(PoolDaemon, NoKillLosesAJobOrRunsOneTwice) {
  constexpr int kSubmitters = 4, kJobs = 6;
  start();
  std::filesystem::create_directories(path("slots"));
  std::filesystem::create_directories(path("ran"));
  // A slot that is taken twice is a folder that exists. A job that is told to
  // give devices back ends in time by itself, so that none has to run twice.
  const std::string line =
      "trap '' TERM; "
      "echo x >>" +
      path("ran") + "/$0; IFS=,; for s in $ECHELON_SLOTS; do mkdir " +
      path("slots") + "/$s || echo $s >>" + path("clash") +
      "; done; sleep 0.0$((RANDOM % 9)); "
      "for s in $ECHELON_SLOTS; do rmdir " +
      path("slots") + "/$s; done";
  std::atomic<int> submitted{0}, refused{0};
  std::vector<std::thread> submitters;
  for (int s = 0; s < kSubmitters; ++s) {
    submitters.emplace_back([&, s] {
      for (int j = 0; j < kJobs; ++j) {
        const std::string name = std::to_string(s) + "-" + std::to_string(j);
        const bool vision = (s + j) % 2 == 0;
        // No daemon may be there when it begins.
        for (int tries = 0; tries < 600; ++tries) {
          const Finished run = finished(
              {"submit", "--project", vision ? "vision" : "language", "-n",
               vision ? "1..2" : "1..3", "--min-guaranteed", "1", "--", "bash",
               "-c", line, name});
          if (run.code == 0) {
            ++submitted;
            break;
          }
          if (run.err.find("no pool runs there") == std::string::npos) {
            ++refused;
            break;
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
      }
    });
  }
  std::mt19937 random(7);
  while (submitted + refused < kSubmitters * kJobs) {
    std::this_thread::sleep_for(std::chrono::milliseconds(
        std::uniform_int_distribution<>(5, 300)(random)));
    replace_daemon();
  }
  for (auto& submitter : submitters) submitter.join();
  EXPECT_EQ(refused, 0);
  ASSERT_TRUE(Command::until(
      [&] { return ask({"list"})["jobs"].empty(); },
      std::chrono::seconds(240)));

  const Json all = ask({"list", "--all"})["jobs"];
  EXPECT_EQ(all.size(), static_cast<size_t>(kSubmitters * kJobs));
  for (const Json& one : all) EXPECT_EQ(one["state"], "done") << one;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path("ran"))) {
    ++files;
    EXPECT_EQ(testing_support::read_file(entry.path()), "x\n") << entry.path();
  }
  EXPECT_EQ(files, kSubmitters * kJobs);
  EXPECT_FALSE(std::filesystem::exists(path("clash")));

  // At each moment, what a project had.
  std::map<std::string, std::vector<std::pair<double, int64_t>>> changes;
  const Json history = ask({"history"});
  for (const Json& one : history["allocations"]) {
    const auto devices = one["devices"].get<int64_t>();
    auto& of = changes[one["project"].get<std::string>()];
    of.emplace_back(one["began"].get<double>(), devices);
    of.emplace_back(one["ended"].get<double>(), -devices);
  }
  for (auto& [project, of] : changes) {
    std::ranges::sort(of);  // at one moment what ends comes first
    int64_t held = 0, most = 0;
    for (const auto& [time, devices] : of)
      most = std::max(most, held += devices);
    EXPECT_LE(most, project == "vision" ? 2 : 4);
    EXPECT_EQ(held, 0);
  }
}

}  // namespace echelon::pool::pool_daemon_test
