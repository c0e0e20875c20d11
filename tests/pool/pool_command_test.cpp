// `echelon pool`: jobs from submission to their end, and what is refused.
#include <gmock/gmock.h>
#include <poll.h>
#include <unistd.h>

#include <mutex>
#include <stop_token>
#include <thread>

#include "echelon/launch/control.h"
#include "echelon/pool/client.h"
#include "tests/pool/pool_server.h"
#include "tests/support/error_text.h"

namespace echelon::pool::pool_command_test {

using testing::HasSubstr;

class PoolCommand : public PoolServer {
 protected:
  void refused(Words words, const std::string& rule) const {
    const Finished run = finished(std::move(words));
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_THAT(run.err, HasSubstr(rule));
  }
};

// Ends with 75 on SIGTERM, as a job that saves.
std::string saves(const std::string& file) {
  return "trap 'exit 75' TERM; echo \"$ECHELON_SLOTS\" >>" + file +
         "; while true; do sleep 0.05; done";
}

TEST_F(PoolCommand, AJobRunsOnItsDevices) {
  start();
  const int64_t id = submit(
      {"--project", "language", "-n", "2"},
      "echo $0 $ECHELON_SLOTS $ECHELON_POOL_DEVICES; echo ended >&2");
  ASSERT_TRUE(reaches(id, "done"));
  const Json done = job(id);
  EXPECT_EQ(done["exit_code"], 0);
  EXPECT_EQ(
      testing_support::read_file(done["log"].get<std::string>()),
      "sh 0,1 2\nended\n");
  EXPECT_EQ(done["devices"], 0);
  EXPECT_EQ(ask({"status"})["idle"], 4);
  EXPECT_EQ(ask({"list"})["jobs"].size(), 0u);
  EXPECT_EQ(ask({"list", "--all"})["jobs"].size(), 1u);
  // The command gets the number where it asks for it.
  const Finished other = finished(
      {"submit", "--project", "language", "-n", "3", "--", "sh", "-c",
       "exit $0", "{devices}"});
  EXPECT_EQ(other.out, "job 2\n");
  ASSERT_TRUE(reaches(2, "failed"));
  EXPECT_EQ(job(2)["exit_code"], 3);
  EXPECT_THAT(why(2), HasSubstr("exit code 3"));
  EXPECT_EQ(ask({"history"})["projects"][0]["project"], "language");
}

// vision's guarantee is lent to language, and comes back.
TEST_F(PoolCommand, AGuaranteedJobTakesItsDevicesBack) {
  start();
  const int64_t borrower = submit(
      {"--project", "language", "-n", "4", "--preemptible"},
      saves(path("borrower")));
  ASSERT_TRUE(appears("borrower"));
  const int64_t owner =
      submit({"--project", "vision"}, "touch " + path("owner") + "; sleep 600");
  ASSERT_TRUE(appears("owner"));
  ASSERT_TRUE(reaches(borrower, "waiting"));
  EXPECT_EQ(
      why(borrower),
      "it needs 4 devices; 3 are idle, and with it language would hold 4, "
      "above its fair share of 3, so that it takes none back");
  finished({"cancel", std::to_string(owner)});
  ASSERT_TRUE(reaches(owner, "cancelled"));
  ASSERT_TRUE(reaches(borrower, "running"));
  ASSERT_TRUE(Command::until(
      [&] { return text_of("borrower") == "0,1,2,3\n0,1,2,3\n"; }));
}

// A job of another program that can do with less starts again on less.
TEST_F(PoolCommand, AProgramIsStartedAgainOnFewerDevices) {
  start();
  const int64_t borrower = submit(
      {"--project", "language", "-n", "2..4", "--preemptible"},
      saves(path("borrower")));
  ASSERT_TRUE(appears("borrower"));
  submit({"--project", "vision"}, "touch " + path("owner") + "; sleep 600");
  ASSERT_TRUE(appears("owner"));
  ASSERT_TRUE(Command::until(
      [&] { return text_of("borrower") == "0,1,2,3\n0,1,2\n"; }));
  EXPECT_EQ(job(borrower)["devices"], 3);
}

TEST_F(PoolCommand, AJobThatIgnoresSigtermIsKilled) {
  start();
  const int64_t id = submit(
      {"--project", "language", "-n", "4", "--preemptible"},
      "trap '' TERM; (sleep 600 & echo $! >" + path("child") + "); touch " +
          path("runs") + "; while true; do sleep 0.05; done");
  ASSERT_TRUE(appears("runs"));
  submit({"--project", "vision"}, "touch " + path("owner"));
  ASSERT_TRUE(appears("owner"));
  EXPECT_THAT(daemon_->err(), HasSubstr("did not end within 1 s of SIGTERM"));
  // Nothing of it is left on the devices.
  const int child = std::stoi(text_of("child"));
  EXPECT_NE(::kill(child, 0), 0);
  ASSERT_TRUE(reaches(id, "running"));
}

// What is being stopped still counts: idle devices are no room below a limit.
TEST_F(PoolCommand, AProjectStaysBelowItsLimitWhileItsJobStops) {
  start(
      "[pool]\ngrace = \"60s\"\n[project.language]\nguaranteed = 2\n"
      "[project.vision]\nguaranteed = 2\nlimit = 2\n");
  const int64_t other =
      submit({"--project", "language", "-n", "2"}, "sleep 600");
  ASSERT_TRUE(reaches(other, "running"));
  const int64_t slow = submit(
      {"--project", "vision", "-n", "2", "--preemptible"},
      "trap 'touch " + path("asked") + "' TERM; touch " + path("runs") +
          "; while [ ! -e " + path("go") + " ]; do sleep 0.05; done; exit 75");
  ASSERT_TRUE(appears("runs"));
  finished({"cancel", std::to_string(other)});
  ASSERT_TRUE(reaches(other, "cancelled"));
  const int64_t next = submit(
      {"--project", "vision", "-n", "2"},
      "echo $ECHELON_SLOTS >" + path("next") + "; sleep 600");
  ASSERT_TRUE(appears("asked"));
  ASSERT_TRUE(reaches(next, "starting"));
  EXPECT_EQ(ask({"status"})["idle"], 2);
  EXPECT_EQ(
      why(next),
      "it has been given 2 devices, and starts when jobs of vision that were "
      "told to end have left room below its limit");
  EXPECT_FALSE(std::filesystem::exists(path("next")));
  std::ofstream(path("go")) << "\n";
  ASSERT_TRUE(reaches(next, "running"));
  EXPECT_TRUE(appears("next"));
  EXPECT_EQ(job(slow)["devices"], 0);
}

// GPUs and their slices are named as CUDA takes them. `echelon train` is told
// of other ones while it runs: here the test is its launcher.
TEST_F(PoolCommand, DevicesAreGivenByUuidAndAgainByAResize) {
  variables_ = {
      "LD_LIBRARY_PATH=" + test_program("fake_nvml"), "FAKE_NVML_MIG=3"};
  start(
      "[project.language]\nguaranteed = 2\n[project.vision]\nguaranteed = 2\n",
      "");
  EXPECT_EQ(ask({"status"})["gpus"], true);
  const std::string name = "echelon-test-" + std::to_string(::getpid());
  launch::ControlSocket control(name);
  std::mutex mutex;
  std::vector<std::string> resizes;
  std::jthread launcher([&](const std::stop_token& ends) {
    std::string ranks = "4";
    while (!ends.stop_requested()) {
      pollfd file{control.fd(), POLLIN, 0};
      if (::poll(&file, 1, 50) != 1) continue;
      control.serve([&](const std::string& request) -> std::string {
        if (request == "status") return "ranks " + ranks + " generation 0";
        const std::lock_guard lock(mutex);
        resizes.push_back(request);
        ranks = request.substr(7, request.find(' ', 7) - 7);
        return "done: from 4 to " + ranks;
      });
    }
  });
  const auto asked = [&](size_t times) {
    return Command::until([&] {
      const std::lock_guard lock(mutex);
      return resizes.size() >= times;
    });
  };
  const std::string fake = folder_.script(
      "echelon", "#!/bin/sh\necho \"$CUDA_VISIBLE_DEVICES $*\" >" +
                     path("given") + "\necho " + name +
                     " >$ECHELON_POOL_CONTROL\nexec sleep 600\n");
  const Finished submitted = finished(
      {"submit", "--project", "language", "-n", "2..4", "--preemptible", "--",
       fake, "train", "first.toml"});
  ASSERT_EQ(submitted.code, 0) << submitted.err;
  ASSERT_TRUE(reaches(1, "running"));
  ASSERT_TRUE(appears("given"));
  ASSERT_TRUE(Command::until([&] {
    return text_of("given") ==
           "MIG-one,MIG-two,MIG-three,GPU-first train -n 4 first.toml\n";
  })) << text_of("given");
  const Finished owner = finished(
      {"submit", "--project", "vision", "-n", "2", "--", "sh", "-c",
       "echo $CUDA_VISIBLE_DEVICES >" + path("owner") + "; sleep 600"});
  ASSERT_EQ(owner.code, 0) << owner.err;
  EXPECT_TRUE(asked(1));
  EXPECT_TRUE(appears("owner"));
  finished({"cancel", "2"});
  EXPECT_TRUE(asked(2));
  EXPECT_TRUE(Command::until([&] { return job(1)["devices"] == 4; }));
  launcher.request_stop();
  launcher.join();
  // It keeps the group of which it has most, the slices, and gets the rest
  // back.
  EXPECT_THAT(
      resizes, testing::ElementsAre(
                   "resize 2 CUDA_VISIBLE_DEVICES=MIG-one,MIG-two "
                   "ECHELON_POOL_DEVICES=2",
                   "resize 4 CUDA_VISIBLE_DEVICES=MIG-one,MIG-two,MIG-three,"
                   "GPU-first ECHELON_POOL_DEVICES=4"));
  EXPECT_EQ(text_of("owner"), "GPU-first,MIG-three\n");
}

TEST_F(PoolCommand, WaitingJobsAreChangedAndCancelled) {
  start();
  submit({"--project", "vision", "-n", "1"}, "sleep 600");
  const int64_t id = submit({"--project", "vision", "-n", "1"}, "sleep 600");
  ASSERT_TRUE(Command::until([&] {
    return why(id).find("it needs 1 of the guarantee of vision") !=
           std::string::npos;
  }));
  EXPECT_EQ(ask({"status"})["projects"][1]["waiting"], 1);
  EXPECT_EQ(
      finished({"cancel", std::to_string(id)}).out,
      "job " + std::to_string(id) + ": cancelled\n");
  EXPECT_EQ(state(id), "cancelled");
  refused({"cancel", std::to_string(id)}, "has ended: cancelled");
  const int64_t large = submit(
      {"--project", "language", "-n", "4", "--preemptible"}, "sleep 600");
  EXPECT_EQ(state(large), "waiting");
  finished({"resize", std::to_string(large), "-n", "2..3"});
  ASSERT_TRUE(reaches(large, "running"));
  EXPECT_EQ(job(large)["devices"], 3);
}

TEST_F(PoolCommand, ADrainedPoolStartsNothing) {
  start();
  const int64_t running = submit({"--project", "language"}, "sleep 600");
  ASSERT_TRUE(reaches(running, "running"));
  ask({"drain"});
  const int64_t id = submit({"--project", "language"}, "sleep 600");
  ASSERT_TRUE(
      Command::until([&] { return why(id).find("the pool is drained") == 0; }));
  replace_daemon();
  EXPECT_EQ(ask({"status"})["drained"], true);
  EXPECT_EQ(state(running), "running");
  ask({"drain", "--undo"});
  ASSERT_TRUE(reaches(id, "running"));
  refused({"drain", "17"}, "the pool has no such device (it has 0, 1, 2, 3)");
}

TEST_F(PoolCommand, MistakesAreRefusedBeforeAnythingWaits) {
  refused({"list"}, "no pool runs there");
  start();
  const auto submit_of = [](Words options) {
    options.insert(options.begin(), "submit");
    options.insert(options.end(), {"--", "true"});
    return options;
  };
  refused(
      submit_of({"--project", "vison"}),
      "--project vison: there is no such project; did you mean \"vision\"?");
  refused(
      submit_of({"--project", "vision", "-n", "3", "--preemptible"}),
      "-n 3: vision has a limit of 2 devices; ask for fewer");
  refused(
      submit_of({"--project", "vision", "-n", "2"}),
      "-n 2: vision has a guarantee of 1 device; ask for fewer, or say "
      "--preemptible to borrow");
  refused(
      submit_of({"--project", "language", "-n", "5", "--preemptible"}),
      "-n 5: the pool has only 4 devices");
  refused(
      submit_of({"--project", "language", "-n", "3..2"}),
      "must be LEAST..MOST");
  refused(
      submit_of(
          {"--project", "language", "-n", "2..4", "--min-guaranteed", "1"}),
      "--min-guaranteed 1: -n 2..4 needs at least 2");
  refused({"why", "7"}, "job 7: there is no such job");
  EXPECT_EQ(ask({"list", "--all"})["jobs"].size(), 0u);

  // As a program of another version asks.
  const auto answer = Json::parse(forward_to_pool(
      path("pool"), R"({"version":"0.0.1","command":"list"})"
                    "\n"));
  EXPECT_EQ(answer["code"], 2);
  EXPECT_THAT(
      answer["error"].get<std::string>(),
      HasAll(
          "the pool's daemon is of echelon ", "and this program of 0.0.1",
          "stop the daemon and start it with this one"));

  Command second(daemon());
  EXPECT_EQ(second.wait(), 2);
  EXPECT_THAT(
      second.err(),
      HasAll(
          "another daemon, process " + std::to_string(daemon_->pid()),
          "has this pool"));
  daemon_->signal(SIGTERM);
  EXPECT_EQ(daemon_->wait(), 0);
  daemon_.reset();
  Command small(daemon("3"));
  EXPECT_EQ(small.wait(), 2);
  EXPECT_THAT(
      small.err(),
      HasSubstr("guaranteed devices are 4 (language 3 + vision 1), but the "
                "pool has 3"));
}

// Who asks is known by the socket.
TEST_F(PoolCommand, UsersAreKeptApart) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  start(
      "[pool]\ngroup = \"nogroup\"\n[project.open]\nguaranteed = 1\n"
      "[project.closed]\nusers = [\"root\"]\n");
  ASSERT_EQ(::chmod(path().c_str(), 0755), 0);
  const auto as_nobody = [&](Words words) {
    words = command(std::move(words));
    words.insert(
        words.begin(),
        {"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"});
    Command run(words);
    const int code = run.wait();
    return Finished{code, run.out(), run.err()};
  };
  const int64_t own = submit({"--project", "open"}, "sleep 600");
  EXPECT_THAT(
      as_nobody({"cancel", std::to_string(own)}).err,
      HasSubstr("is of root; its user and root may change it"));
  EXPECT_THAT(
      as_nobody({"submit", "--project", "closed", "--preemptible", "--", "id"})
          .err,
      HasSubstr("--project closed: nobody is not in it"));
  EXPECT_THAT(as_nobody({"drain"}).err, HasSubstr("only root"));
  const Finished taken = as_nobody(
      {"submit", "--project", "open", "--preemptible", "--", "id", "-u"});
  EXPECT_EQ(taken.out, "job 2\n") << taken.err;
  ASSERT_TRUE(reaches(2, "done"));
  EXPECT_EQ(
      testing_support::read_file(job(2)["log"].get<std::string>()), "65534\n");
  // Without the group the socket is its owner's.
  daemon_->signal(SIGTERM);
  daemon_->wait();
  start("[project.open]\nguaranteed = 1\n");
  EXPECT_THAT(
      as_nobody({"list"}).err, HasSubstr("you may not talk to this pool"));
}

}  // namespace echelon::pool::pool_command_test
