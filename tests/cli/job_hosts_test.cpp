// Hosts that an engine names, and those of --hosts and --hostfile, with a stand
// for ssh that enters a test host.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/support/test_hosts.h"

namespace echelon::job_hosts_test {

using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;
using testing_support::Command;
using testing_support::TempFolder;
using testing_support::TestHosts;
using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

const Words kPlace = {
    "--", "sh", "-c", "echo $RANK of $WORLD_SIZE on host $GROUP_RANK"};

Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// `echelon run` with these variables ("A=1 B=2") and flags.
Words run(const std::string& variables, const Words& flags) {
  Words words = {"env"};
  std::istringstream text(variables);
  for (std::string word; text >> word;) words.push_back(word);
  return words + Words{program("echelon"), "run", "--no-prefix"} + flags +
         kPlace;
}

TEST(EngineHosts, LaunchersTakeTheirHostsFromTheEngine) {
  const std::string group =
      "LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=127.0.0.1 MASTER_PORT=" +
      std::to_string(testing_support::free_port()) + " LWS_WORKER_INDEX=";
  Command b(run(group + "1", {"-n", "1"}));
  Command a(run(group + "0", {"-n", "2"}));
  EXPECT_EQ(a.wait(), 0) << a.err();
  EXPECT_EQ(b.wait(), 0) << b.err();
  EXPECT_THAT(
      lines_of(a.out() + b.out()),
      UnorderedElementsAre(
          "0 of 3 on host 0", "1 of 3 on host 0", "2 of 3 on host 1"));
  EXPECT_THAT(
      b.err(), HasSubstr("echelon: host 2 of 2 of LeaderWorkerSet 127, master "
                         "127.0.0.1:"));
}

TEST(EngineHosts, FlagsWinAndThatIsSaid) {
  const std::string port = std::to_string(testing_support::free_port());
  const std::string group =
      "LWS_GROUP_SIZE=3 LWS_LEADER_ADDRESS=lws-0.lws LWS_WORKER_INDEX=0";
  const Words flags = {"--nnodes",      "2", "--master-addr", "127.0.0.1",
                       "--master-port", port};
  Command a(run(group, flags));
  Command b(run(group, flags + Words{"--node-rank", "1"}));
  EXPECT_EQ(a.wait(), 0) << a.err();
  EXPECT_EQ(b.wait(), 0) << b.err();
  EXPECT_THAT(
      b.err(),
      HasAll(
          "echelon: --nnodes 2 is used, not 3 as LeaderWorkerSet lws-0 has it",
          "echelon: --master-addr 127.0.0.1 is used, not lws-0.lws as ",
          "echelon: --node-rank 1 is used, not 0 as ",
          "echelon: host 2 of 2 of LeaderWorkerSet lws-0, master 127.0.0.1:" +
              port));
  Command alone(run(group, {"--nnodes", "1"}));
  EXPECT_EQ(alone.wait(), 0) << alone.err();
  EXPECT_EQ(alone.out(), "0 of 1 on host 0\n");
  EXPECT_THAT(alone.err(), HasSubstr("--nnodes 1 is used: a job of this host"));
}

TEST(EngineHosts, SaysWhatAnEngineLeavesOut) {
  Command pods(run("JOB_COMPLETION_INDEX=1", {}));
  EXPECT_EQ(pods.wait(), 2);
  EXPECT_THAT(
      pods.err(), HasAll("does not say how many pods it has", "PET_NNODES"));
  Command first(run("JOB_COMPLETION_INDEX=1 PET_NNODES=2", {}));
  EXPECT_EQ(first.wait(), 2);
  EXPECT_THAT(first.err(), HasSubstr("give --master-addr"));
  // Each pod would make a token of its own.
  const TempFolder home;
  Command token(run(
      "-u ECHELON_TOKEN HOME=" + home.path() +
          " XDG_CONFIG_HOME=" + home.path() +
          " LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0 LWS_LEADER_ADDRESS=127.0.0.1",
      {}));
  EXPECT_EQ(token.wait(), 2);
  EXPECT_THAT(
      token.err(), HasAll("its pods need one token", "kubectl create secret"));
  EXPECT_FALSE(std::filesystem::exists(home.path() + "/echelon"));
  Command several(
      run("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 "
          "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
          {}));
  EXPECT_EQ(several.wait(), 2);
  EXPECT_THAT(several.err(), HasSubstr("mpirun has started 4 launchers"));
  const std::string batch =
      "SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=2 SLURM_TASKS_PER_NODE=3,1 "
      "SLURM_GPUS_ON_NODE=3";
  Command uneven(run(batch, {}));
  EXPECT_EQ(uneven.wait(), 2);
  EXPECT_THAT(
      uneven.err(),
      HasSubstr("Slurm job 42 has 3,1 tasks on its nodes, and this command "
                "starts as many ranks on each: give -n"));
  Command gpus(
      run("SLURM_JOB_ID=42 SLURM_JOB_NUM_NODES=2 SLURM_GPUS=6 "
          "SLURM_GPUS_ON_NODE=4",
          {}));
  EXPECT_EQ(gpus.wait(), 2);
  EXPECT_THAT(
      gpus.err(),
      HasSubstr("Slurm job 42 has 6 GPUs on 2 nodes, 4 of them here, and this "
                "command starts as many ranks on each: give -n, or ask Slurm "
                "for --ntasks-per-node or --gpus-per-node"));
  Command alone(run(batch, {"--nnodes", "1"}));
  EXPECT_EQ(alone.wait(), 0) << alone.err();
}

// The names of pods come seconds after them: only there they are waited for.
TEST(EngineHosts, NamesOfPodsMayComeLater) {
  if (const std::string reason = TestHosts(1).reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const TempFolder folder;
  std::ofstream(folder.path() + "/hosts")
      << "127.0.0.1 localhost\n127.0.0.2 j-1.first.svc j-1\n";
  std::ofstream(folder.path() + "/switch") << "hosts: files\n";
  const auto pod = [&](const std::string& variables, const Words& flags) {
    return Words{
               "unshare",
               "--uts",
               "--mount",
               "sh",
               "-c",
               "hostname j-1 && mount --bind " + folder.path() +
                   "/hosts /etc/hosts && mount --bind " + folder.path() +
                   "/switch /etc/nsswitch.conf && exec \"$@\"",
               "sh"} +
           run(variables, flags);
  };
  const Words flags = {"--nnodes",      "2",  "--node-rank", "1",
                       "--master-addr", "j-0"};
  Command engine(pod("JOB_COMPLETION_INDEX=1 PET_NNODES=2", {}));
  Command kubernetes(pod("KUBERNETES_SERVICE_HOST=10.0.0.1", flags));
  Command none(pod("-u KUBERNETES_SERVICE_HOST", flags));
  EXPECT_EQ(none.wait(), 2);
  EXPECT_THAT(none.err(), HasSubstr("\"j-0\": Name or service not known"));
  for (Command* one : {&engine, &kubernetes}) {
    EXPECT_TRUE(Command::until([&] {
      return one->err().find("waiting for the name j-0") != std::string::npos;
    })) << one->err();
  }
  EXPECT_THAT(
      engine.err(),
      HasSubstr("host 2 of 2 of Kubernetes job j, master j-0.first.svc\n"));
}

/// Two test hosts, and an ssh that enters them by address.
class SshHosts : public testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.reason().empty()) GTEST_SKIP() << hosts_.reason();
    std::string text = "#!/bin/sh\nhost=$1\nshift\ncase $host in\n";
    for (int host = 0; host < 2; ++host) {
      text += TestHosts::address(host) + ") exec";
      for (const auto& word : hosts_.on(host, {"sh", "-c"})) {
        text += " '" + word + "'";
      }
      text += " \"$*\" ;;\n";
    }
    agent_ = folder_.script(
        "agent", text + "*) echo no route >&2; exit 255 ;;\nesac\n");
  }
  std::string both() const {
    return TestHosts::address(0) + "," + TestHosts::address(1);
  }
  Words
  on(const std::string& names, const Words& flags, const Words& ranks) const {
    return Words{program("echelon"),
                 "run",
                 "--no-prefix",
                 "--hosts",
                 names,
                 "--ssh",
                 agent_} +
           flags + ranks;
  }
  TestHosts hosts_;
  TempFolder folder_;
  std::string agent_;
};

TEST_F(SshHosts, StartTheCommandOnEach) {
  Command job(on(both(), {"-n", "2"}, kPlace));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(
      lines_of(job.out()), UnorderedElementsAre(
                               "0 of 4 on host 0", "1 of 4 on host 0",
                               "2 of 4 on host 1", "3 of 4 on host 1"));
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST_F(SshHosts, ComeFromAFileWithTheirRanks) {
  const std::string file = folder_.path() + "/hosts";
  std::ofstream(file) << "# two\n"
                      << TestHosts::address(0) << " slots=1\n\n"
                      << TestHosts::address(1) << " slots=2  # larger\n";
  const auto job = [&](const Words& more) {
    return Words{program("echelon"),   "run",   "--no-prefix",
                 "--hostfile=" + file, "--ssh", agent_} +
           more + kPlace;
  };
  Command slots(job({}));
  EXPECT_EQ(slots.wait(), 0) << slots.err();
  EXPECT_THAT(
      lines_of(slots.out()),
      UnorderedElementsAre(
          "0 of 3 on host 0", "1 of 3 on host 1", "2 of 3 on host 1"));
  Command given(job({"-n", "1"}));
  EXPECT_EQ(given.wait(), 0) << given.err();
  EXPECT_EQ(lines_of(given.out()).size(), 2u);
}

// Words with blanks and quotes arrive whole, and the token in no command line.
TEST_F(SshHosts, GetTheirWordsAndTheToken) {
  const std::string word = "it's \"$HOME\" *";
  const std::string seen = folder_.path() + "/seen";
  Command job(
      on(both(), {},
         {"--", "sh", "-c",
          "printf '%s|' \"$1\"; pwd; until [ -e \"$2\" ]; do sleep 0.05; done",
          "sh", word, seen}));
  std::string lines;
  ASSERT_TRUE(job.until_output("|", 2)) << job.err();
  for (const pid_t pid : job.living()) {
    lines +=
        testing_support::read_file("/proc/" + std::to_string(pid) + "/cmdline");
  }
  EXPECT_THAT(lines, HasSubstr("--node-rank"));
  EXPECT_THAT(lines, Not(HasSubstr("7777777777777777")));
  std::ofstream{seen};
  EXPECT_EQ(job.wait(), 0) << job.err();
  const std::string line =
      word + "|" + std::filesystem::current_path().string();
  EXPECT_THAT(lines_of(job.out()), UnorderedElementsAre(line, line));
}

// An ssh that wants a password would otherwise wait for one, unseen.
TEST_F(SshHosts, AreNotReachedWithTheTerminal) {
  const std::string asks = folder_.script(
      "asks",
      "#!/bin/sh\n{ read answer </dev/tty; } 2>/dev/null && exit 7\nexit "
      "255\n");
  Command job(
      {"script", "--quiet", "--return", "/dev/null", "--command",
       program("echelon") + " run --hosts a,b --ssh " + asks + " -- true"});
  EXPECT_EQ(job.wait(), 1) << job.out();
  EXPECT_THAT(
      job.out(), testing::ContainsRegex("host [ab]: its ssh ended with code "
                                        "255"));
}

// What hangs on another host ends with the second signal.
TEST_F(SshHosts, WhoseSshHangsAreLeft) {
  const std::string hangs = folder_.script(
      "hangs", "#!/bin/sh\necho ready\nexec sleep 1000 </dev/null\n");
  Command job(
      {program("echelon"), "run", "--hosts", "a,b", "--ssh", hangs, "--",
       "true"});
  ASSERT_TRUE(job.until_output("ready", 2)) << job.err();
  job.signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_FALSE(job.living().empty());
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST_F(SshHosts, EndTogetherWhenOneFails) {
  Command job(on(
      both(), {},
      {"--", "sh", "-c", "echo ready; [ $RANK = 1 ] && exit 3; sleep 1000"}));
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1"));
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST_F(SshHosts, AreToldOfASignal) {
  Command job(
      on(both(), {},
         {"--", "sh", "-c",
          "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done"}));
  ASSERT_TRUE(job.until_output("ready", 2)) << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 75) << job.err();
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST_F(SshHosts, EndWithTheirCommandHoweverItEnds) {
  Command job(on(both(), {}, {"--", "sh", "-c", "echo ready; sleep 1000"}));
  ASSERT_TRUE(job.until_output("ready", 2)) << job.err();
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST_F(SshHosts, AreNotWaitedForWhenOneCannotBeReached) {
  Command job(on(TestHosts::address(0) + ",nowhere", {}, kPlace));
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(
      job.err(), HasAll(
                     "no route",
                     "echelon: host nowhere: its ssh ended with "
                     "code 255; the others are told to stop"));
  EXPECT_TRUE(Command::until([&] { return job.living().empty(); }));
}

TEST_F(SshHosts, OfAJobThatMayGoOnAreNotEnded) {
  const std::string lost = folder_.path() + "/lost";
  Command job(
      on(both(), {"--nnodes", "1:2", "--max-restarts", "1"},
         {"--", "sh", "-c",
          "echo g$ECHELON_GENERATION $RANK of $WORLD_SIZE; [ -e \"$1\" ] || "
          "sleep 1000",
          "sh", lost}));
  ASSERT_TRUE(job.until_output(" of 2", 2)) << job.err();
  std::ofstream{lost};
  for (const pid_t pid : job.living()) {
    const auto line =
        testing_support::read_file("/proc/" + std::to_string(pid) + "/cmdline");
    const std::string second = std::string("--node-rank") + '\0' + "1";
    if (line.find(second + '\0') != std::string::npos) kill(pid, SIGKILL);
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr(" 0 of 1"));
}

// -n without a layout is data parallelism over the ranks of all hosts.
TEST_F(SshHosts, TrainAModel) {
  if (!std::filesystem::exists(program("echelon-train"))) {
    GTEST_SKIP() << "needs LibTorch: build with ECHELON_LIBTORCH";
  }
  const auto train = [&](const std::string& name, const Words& more) {
    return Words{
               program("echelon"),
               "train",
               source_path("examples/configs/digits.toml"),
               "--hosts",
               both(),
               "--ssh",
               agent_,
               "--set",
               "train.run=" + folder_.path() + "/" + name,
               "--set=train.epochs=0",
               "--set=train.steps=3",
               "--set=optimizer.warmup_steps=0"} +
           more;
  };
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"-n", "1"}, "\ndp = 2\n"}, {{"--layout", "fsdp=2"}, "\nfsdp = 2\n"}};
  for (const auto& [flags, layout] : cases) {
    const std::string run = folder_.path() + "/" + flags[0];
    Command job(train(flags[0], flags));
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_TRUE(std::filesystem::exists(run + "/log/rank-1.log"));
    EXPECT_THAT(
        testing_support::read_file(run + "/config.toml"), HasSubstr(layout));
  }
}

TEST(SshHostsErrors, SayWhatIsWrong) {
  const TempFolder folder;
  const std::string file = folder.path() + "/hosts";
  std::ofstream(file) << "a slots=2\nb 4\n";
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"--hosts", "a,,b"}, "\"\" is no name of a host"},
      {{"--hosts", "a,-oProxyCommand=x"}, "\"-oProxyCommand=x\" is no name"},
      {{"--hosts", "a;b"}, "\"a;b\" is no name"},
      {{"--hosts", "a,b", "--nnodes", "3"}, "there are 2 hosts"},
      {{"--hosts", "a,b", "--node-rank", "1"}, "--node-rank 1: --hosts"},
      {{"--hosts", "a", "--hostfile", "f"}, "--hostfile f: --hosts"},
      {{"--hostfile", "/none"}, "--hostfile /none: cannot be read"},
      {{"--hostfile", file}, "line 2: \"4\" is not understood"},
      {{"--hosts", "a", "--ssh", " "}, "names no program"}};
  for (const auto& [flags, message] : cases) {
    Command job(run("", flags));
    EXPECT_EQ(job.wait(), 2) << message;
    EXPECT_THAT(job.err(), HasSubstr(message));
  }
}

// mpirun logs in to the other host, and starts one launcher on each.
TEST_F(SshHosts, AreThoseOfMpirun) {
  if (Command({"sh", "-c", "command -v mpirun"}).wait() != 0) {
    GTEST_SKIP() << "needs mpirun (Debian package openmpi-bin): run `make "
                    "extras` once";
  }
  Command job(hosts_.on(
      0,
      Words{
          "mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", agent_,
          "-x", "ECHELON_TOKEN", "--host",
          TestHosts::address(0) + ":1," + TestHosts::address(1) + ":1", "-n",
          "2", program("echelon"), "run", "--no-prefix", "-n", "2"} +
          kPlace));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(
      lines_of(job.out()), UnorderedElementsAre(
                               "0 of 4 on host 0", "1 of 4 on host 0",
                               "2 of 4 on host 1", "3 of 4 on host 1"));
  EXPECT_THAT(
      job.err(), HasAll(
                     "host 1 of 2 of mpirun, master " + TestHosts::address(0),
                     "host 2 of 2 of mpirun, master "));
}

}  // namespace echelon::job_hosts_test
