// Jobs of several hosts: network namespaces, each with a launcher of its own,
// and launchers that connect on loopback.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include "echelon/launch/hosts.h"
#include "tests/launch/launched.h"
#include "tests/support/error_text.h"
#include "tests/support/test_hosts.h"

namespace echelon::testing_support::launch_hosts_test {

using launch::have_quorum;
using testing::HasSubstr;
using testing::StartsWith;

std::vector<std::string> operator+(
    std::vector<std::string> words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void expect_end(Command& a, Command& b, int exit_code) {
  EXPECT_EQ(a.wait(), exit_code) << a.err();
  EXPECT_EQ(b.wait(), exit_code) << b.err();
}

/// Two launchers of one job, connected through this host's loopback.
class Loopback : public testing::Test {
 protected:
  std::vector<std::string> node(
      int rank, const std::vector<std::string>& program,
      const std::string& more = "") const {
    return launch(
        words(
            "--nnodes 2 --node-rank " + std::to_string(rank) +
            " --master-addr 127.0.0.1 --master-port " + std::to_string(port_) +
            (rank == 0 ? " -n 2 " : " -n 3 ") + more),
        program);
  }
  /// Writes a token file and returns the option for it.
  std::string token(const std::string& name, char digit) const {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path) << std::string(64, digit) << "\n";
    std::filesystem::permissions(path, std::filesystem::perms(0600));
    return "--token-file " + path;
  }
  int port_ = free_port();
  TempFolder folder_;
};

TEST_F(Loopback, RanksAreNumberedOverHosts) {
  const std::vector<std::string> program = {
      "sh", "-c",
      "echo \"$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE "
      "$GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR $ECHELON_NODE_ADDRESS "
      "$MASTER_PORT.$ECHELON_JOB.$TORCHELASTIC_RUN_ID\""};
  Command b(node(1, program));  // comes first, and waits
  Command a(node(0, program));
  expect_end(a, b, 0);
  std::set<std::string> lines;
  std::set<std::string> jobs;
  std::istringstream text(a.out() + b.out());
  for (std::string line; std::getline(text, line);) {
    lines.insert(line.substr(0, line.rfind(' ')));
    jobs.insert(line.substr(line.rfind(' ')));
  }
  const std::string end = " 127.0.0.1 127.0.0.1";
  EXPECT_THAT(
      lines, testing::ElementsAre(
                 "[0] 0 0 5 2 0 2" + end, "[1] 1 1 5 2 0 2" + end,
                 "[2] 2 0 5 3 1 2" + end, "[3] 3 1 5 3 1 2" + end,
                 "[4] 4 2 5 3 1 2" + end));
  EXPECT_EQ(jobs.size(), 1u);
}

TEST_F(Loopback, AFailureIsReportedOnBothHosts) {
  Command a(node(0, rank_program({"throw", "3"})));
  Command b(node(1, rank_program({"throw", "3"})));
  expect_end(a, b, 1);
  for (const Command* job : {&a, &b}) {
    EXPECT_EQ(
        last_line(*job), "rank 3: std::runtime_error: batch 7 does not fit");
    EXPECT_THAT(job->err(), HasSubstr("rank 3 (node 1, 127.0.0.1) ended with"));
    EXPECT_TRUE(job->living().empty());
  }
}

TEST_F(Loopback, ALostPeerOnAnotherHostIsNotTheCause) {
  Command a(node(0, rank_program({"lost", "4"})));
  Command b(node(1, rank_program({"lost", "4"})));
  expect_end(a, b, 137);
  EXPECT_THAT(last_line(a), StartsWith("rank 4: killed by SIGKILL"));
}

TEST_F(Loopback, CtrlCOnOneHostStopsAll) {
  Command a(node(0, rank_program({"wait"})));
  Command b(node(1, rank_program({"wait"})));
  ASSERT_TRUE(a.until_output("ready", 2));
  ASSERT_TRUE(b.until_output("ready", 3));
  b.signal(SIGINT);
  expect_end(a, b, 130);
  EXPECT_EQ(last_line(a), "echelon: stopped by SIGINT");
}

// A scheduler that takes hosts away signals the launcher of each.
TEST_F(Loopback, OneStopOfAllLaunchersIsOne) {
  const std::vector<std::string> slow = {
      "sh", "-c",
      "trap 'echo saving; sleep 1; echo saved; exit 75' TERM; echo ready; "
      "while :; do sleep 0.05; done"};
  Command a(node(0, slow));
  Command b(node(1, slow));
  ASSERT_TRUE(a.until_output("ready", 2));
  ASSERT_TRUE(b.until_output("ready", 3));
  a.signal(SIGTERM);
  ASSERT_TRUE(b.until_output("saving", 3));
  b.signal(SIGTERM);
  expect_end(a, b, 75);
  EXPECT_TRUE(a.until_output("saved", 2));
  EXPECT_TRUE(b.until_output("saved", 3));
}

TEST_F(Loopback, ALauncherThatIsKilledEndsTheJobElsewhere) {
  for (const int victim : {0, 1}) {
    port_ = free_port();
    Command a(node(0, rank_program({"ignore-term"}), "--grace-ms 100"));
    Command b(node(1, rank_program({"ignore-term"}), "--grace-ms 100"));
    ASSERT_TRUE(a.until_output("ready", 2));
    ASSERT_TRUE(b.until_output("ready", 3));
    Command& killed = victim == 0 ? a : b;
    Command& other = victim == 0 ? b : a;
    killed.signal(SIGKILL);
    EXPECT_EQ(killed.wait(), 137);
    EXPECT_EQ(other.wait(), 1);
    EXPECT_THAT(
        last_line(other), HasSubstr(
                              "the launcher of node " + std::to_string(victim) +
                              " (127.0.0.1) is gone"));
    EXPECT_TRUE(other.living().empty());
    EXPECT_TRUE(Command::until([&] { return killed.living().empty(); }));
  }
}

TEST_F(Loopback, MissingHostsAreNamed) {
  Command a(node(0, {"true"}, "--join-ms 200"));
  EXPECT_EQ(a.wait(), 2);
  EXPECT_THAT(a.err(), HasAll("after 0.2 s node 1 of 2", "--master-addr"));
  Command b(node(1, {"true"}, "--join-ms 200"));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(
      b.err(), HasAll(
                   "node 0 does not answer at 127.0.0.1, "
                   "port " +
                       std::to_string(port_),
                   "refused"));
  EXPECT_EQ(a.err_lines().size() + b.err_lines().size(), 2u);
}

TEST_F(Loopback, HostsThatDisagreeAreRefused) {
  Command a(node(0, rank_program({"wait"})));
  auto other = node(1, {"true"});
  other[2] = "3";
  Command b(other);
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(b.err(), HasSubstr("--nnodes 2, this one has 3"));
  Command c(node(1, rank_program({"wait"})));
  ASSERT_TRUE(a.until_output("ready", 2));
  a.signal(SIGTERM);
  EXPECT_EQ(a.wait(), 130);
  EXPECT_EQ(c.wait(), 130);
}

/// A Python program whose connect() connects to the launcher of node 0, and
/// whose prove() does the handshake there.
std::vector<std::string> stranger(
    int port, const std::string& script,
    const std::vector<std::string>& arguments = {}) {
  std::vector<std::string> program = {
      "python3", "-c",
      "import hmac, os, socket, sys, time\n"
      "def connect():\n"
      "    while True:\n"
      "        try:\n"
      "            return socket.create_connection(('127.0.0.1', " +
          std::to_string(port) +
          "))\n"
          "        except ConnectionRefusedError:\n"
          "            time.sleep(0.01)\n"
          "def prove(s):\n"
          "    key = bytes.fromhex(os.environ['ECHELON_TOKEN'])\n"
          "    sign = lambda end, nonces: hmac.digest(\n"
          "        key, b'ECHhost1 ' + end + nonces, 'sha256')\n"
          "    own = os.urandom(32)\n"
          "    s.sendall(b'ECHhost1' + own)\n"
          "    answer = s.recv(72, socket.MSG_WAITALL)\n"
          "    nonces = own + answer[8:40]\n"
          "    assert answer[40:] == sign(b'server', nonces)\n"
          "    s.sendall(sign(b'client', nonces))\n"
          "    assert s.recv(1) == b'+'\n"
          "def ended(s):\n"
          "    try:\n"
          "        return s.recv(1) == b''\n"
          "    except ConnectionResetError:\n"
          "        return True\n" +
          script};
  program.insert(program.end(), arguments.begin(), arguments.end());
  return program;
}

TEST_F(Loopback, NumbersOutOfRangeAreRefused) {
  const auto hello = [](const std::string& nodes, const std::string& node,
                        const std::string& ranks) {
    return R"({"protocol": 3, "nodes": )" + nodes +
           R"(, "least": 2, "node_rank": )" + node + R"(, "ranks": )" + ranks +
           R"(, "port": 1, "identity": ""})";
  };
  const std::vector<std::string> sizes = {"sh", "-c", "echo $RANK $WORLD_SIZE"};
  Command a(node(0, sizes));
  Command c(stranger(
      port_,
      "for line in sys.argv[1:]:\n"
      "    with connect() as s:\n"
      "        prove(s)\n"
      "        s.sendall(line.encode() + b'\\n')\n"
      "        print(s.makefile().readline(), end='', flush=True)\n",
      {hello("4294967298", "1", "3"), hello("2", "4294967297", "3"),
       hello("2", "1", "2147483647"), hello("2", "1", "4294967299"),
       hello("2", "1", "18446744073709551615"), hello("2", "1", "2.5"),
       hello("2", "1", "\"many\"")}));
  EXPECT_EQ(c.wait(), 0) << c.err();
  EXPECT_THAT(
      c.out(),
      HasAll(
          "node 0 has --nnodes 2, this one has 4294967298",
          "--node-rank 4294967297 is out of range: with --nnodes 2",
          "2147483647 ranks on one host are out of range: it is 1 to 1024",
          "4294967299 ranks", "18446744073709551615 ranks", "2.5 ranks",
          "it does not speak as a launcher"));
  Command b(node(1, sizes));
  expect_end(a, b, 0);
  EXPECT_THAT(a.out(), HasAll("0 5\n", "1 5\n"));
}

TEST_F(Loopback, ASilentConnectionIsClosed) {
  Command a(node(0, {"true"}, "--join-ms 4000"));
  Command c(stranger(
      port_,
      "print(ended(connect()), flush=True)\n"
      "with connect() as s:\n"
      "    prove(s)\n"
      "    print(s.makefile().readline())\n"));
  EXPECT_EQ(c.wait(), 0) << c.err();
  EXPECT_THAT(
      c.out(), HasAll("True", "did not say which node it is within 1 s"));
  EXPECT_THAT(
      a.err(), HasSubstr("closed a connection from 127.0.0.1: it did not prove "
                         "the token within 1 s"));
}

TEST_F(Loopback, SilentConnectionsKeepNoHostOut) {
  const std::string silent =
      "held = [connect() for _ in range(400)]\n"
      "print(ended(held[0]), flush=True)\n"
      "time.sleep(600)\n";
  for (const std::string limit : {"500", "40"}) {
    port_ = free_port();
    auto limited = node(0, {"true"});
    const std::vector<std::string> shell = {
        "sh", "-c", "ulimit -n " + limit + "; exec \"$@\"", "sh"};
    limited.insert(limited.begin(), shell.begin(), shell.end());
    Command a(limited);
    Command c(stranger(port_, silent));
    ASSERT_TRUE(c.until_output("True"));
    Command b(node(1, {"true"}));
    expect_end(a, b, 0);
    EXPECT_EQ(count(a.err(), "echelon: closed"), 1) << a.err();
    EXPECT_THAT(a.err(), HasSubstr("connections wait"));
  }
}

TEST_F(Loopback, HostsWithOneTokenMeet) {
  Command a(node(0, {"true"}, token("a", '1')));
  Command b(node(1, {"true"}, token("b", '1')));
  expect_end(a, b, 0);
}

TEST_F(Loopback, AHostWithAnotherTokenIsRefusedAndTheOthersGoOn) {
  const std::string mine = token("mine", '1');
  const std::string other = token("other", '2');
  Command a(node(0, {"true"}, mine));
  Command b(node(1, {"true"}, other));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(
      b.err(), HasAll(
                   "node 0 at 127.0.0.1, port " + std::to_string(port_),
                   "(127.0.0.1) has another token than the file " +
                       folder_.path() + "/other",
                   "mode 0600"));
  Command c(node(1, {"true"}, mine));
  expect_end(a, c, 0);
  EXPECT_THAT(
      a.err(),
      HasAll(
          "a connection from 127.0.0.1: it has another token than the file " +
              folder_.path() + "/mine",
          "mode 0600"));
  for (const std::string& text : {a.err(), b.err()}) {
    EXPECT_THAT(text, testing::Not(HasSubstr("1111")));
    EXPECT_THAT(text, testing::Not(HasSubstr("2222")));
  }
}

TEST_F(Loopback, AHostThatAloneEncryptsIsRefusedAndTheOthersGoOn) {
  const std::string mine = token("mine", '1');
  Command a(node(0, {"true"}, mine + " --tls yes"));
  Command b(node(1, {"true"}, mine));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(b.err(), HasSubstr("only one of the two hosts has --tls"));
  Command c(node(1, {"true"}, mine + " --tls yes"));
  expect_end(a, c, 0);
  EXPECT_THAT(a.err(), HasSubstr("only one of the two hosts has --tls"));
}

TEST_F(Loopback, ATokenThatOthersCanReadIsRefused) {
  const std::string option = token("open", '1');
  std::filesystem::permissions(
      folder_.path() + "/open", std::filesystem::perms(0644));
  Command a(node(0, {"true"}, option));
  EXPECT_EQ(a.wait(), 2);
  EXPECT_THAT(a.err(), HasAll(folder_.path() + "/open", "chmod 600"));
}

TEST_F(Loopback, RanksHaveTheStoresKeyAndNotTheToken) {
  const std::vector<std::string> program = {
      "sh", "-c", "echo \"$ECHELON_STORE_KEY.$ECHELON_TOKEN\""};
  Command a(node(0, program));
  Command b(node(1, program));
  expect_end(a, b, 0);
  std::set<std::string> keys;
  std::istringstream text(a.out() + b.out());
  for (std::string line; std::getline(text, line);) {
    keys.insert(line.substr(line.find(' ') + 1));
  }
  ASSERT_EQ(keys.size(), 1u);
  EXPECT_EQ(keys.begin()->size(), 65u);
  EXPECT_EQ(keys.begin()->back(), '.');
}

int64_t most_memory_kib(pid_t pid) {
  const std::string status =
      read_file("/proc/" + std::to_string(pid) + "/status");
  const size_t at = status.find("VmHWM:");
  return at == std::string::npos ? 0 : std::stoll(status.substr(at + 6));
}

// Each says "done" when it has tried, and node 0 waits on.
TEST_F(Loopback, StrangersDoNoHarm) {
  const std::string done =
      "print('done', flush=True)\n"
      "time.sleep(600)\n";
  for (const std::string attack :
       {// garbage
        "for i in range(20):\n"
        "    s = connect()\n"
        "    s.sendall(os.urandom(1000))\n"
        "    assert ended(s)\n",
        // another protocol
        "s = connect()\n"
        "s.sendall(b'GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n')\n"
        "assert ended(s)\n",
        // a launcher without a token
        "s = connect()\n"
        "s.sendall(b'{\"protocol\": 1, \"nodes\": 2, \"node_rank\": 1, '\n"
        "          b'\"ranks\": 3}\\n')\n"
        "assert ended(s)\n",
        // slowly
        "s = connect()\n"
        "try:\n"
        "    for c in b'ECHhost1' + bytes(64):\n"
        "        s.sendall(bytes([c]))\n"
        "        time.sleep(0.2)\n"
        "    raise SystemExit('not closed')\n"
        "except (BrokenPipeError, ConnectionResetError):\n"
        "    pass\n",
        // much
        "s = connect()\n"
        "s.sendall(b'ECHhost1')\n"
        "try:\n"
        "    for i in range(1000):\n"
        "        s.sendall(bytes(1 << 20))\n"
        "    raise SystemExit('not closed')\n"
        "except (BrokenPipeError, ConnectionResetError):\n"
        "    pass\n",
        // without the token
        "s = connect()\n"
        "s.sendall(b'ECHhost1' + bytes(32))\n"
        "assert len(s.recv(72, socket.MSG_WAITALL)) == 72\n"
        "s.sendall(os.urandom(32))\n"
        "assert ended(s)\n",
        // with node 0's own proof
        "s = connect()\n"
        "s.sendall(b'ECHhost1' + bytes(32))\n"
        "s.sendall(s.recv(72, socket.MSG_WAITALL)[40:])\n"
        "assert ended(s)\n"}) {
    SCOPED_TRACE(attack);
    port_ = free_port();
    Command a(node(0, {"true"}));
    Command c(stranger(port_, attack + done));
    ASSERT_TRUE(c.until_output("done")) << c.err();
    EXPECT_LT(most_memory_kib(a.pid()), 32 << 10);
    EXPECT_GT(most_memory_kib(a.pid()), 0);
    Command b(node(1, {"true"}));
    expect_end(a, b, 0);
    EXPECT_EQ(count(a.err(), "closed a connection from 127.0.0.1"), 1)
        << a.err();
  }
}

// What a node sent once is no way in for who recorded it.
TEST_F(Loopback, ARecordedMeetingIsNoWayIn) {
  const std::string proxy =
      "port = int(sys.argv[1])\n"
      "listener = socket.create_server(('127.0.0.1', port))\n"
      "print('up', flush=True)\n"
      "node, _ = listener.accept()\n"
      "s = connect()\n"
      "record = [node.recv(40, socket.MSG_WAITALL)]\n"
      "s.sendall(record[0])\n"
      "node.sendall(s.recv(72, socket.MSG_WAITALL))\n"
      "record.append(node.recv(32, socket.MSG_WAITALL))\n"
      "node.close()\n"
      "s.close()\n"  // the node is lost on its way
      "s = connect()\n"
      "s.sendall(record[0])\n"
      "s.recv(72, socket.MSG_WAITALL)\n"
      "s.sendall(record[1])\n"
      "print('closed' if ended(s) else 'open', flush=True)\n";
  const int between = free_port();
  Command c(stranger(port_, proxy, {std::to_string(between)}));
  ASSERT_TRUE(c.until_output("up"));
  Command a(node(0, {"true"}));
  const int real = std::exchange(port_, between);
  Command b(node(1, {"true"}, "--join-ms 2000"));
  EXPECT_EQ(c.wait(), 0) << c.err();
  EXPECT_THAT(c.out(), HasSubstr("closed"));
  EXPECT_EQ(b.wait(), 2) << "nobody takes its connection";
  port_ = real;
  Command again(node(1, {"true"}));
  expect_end(a, again, 0);
}

TEST_F(Loopback, AnotherProgramOnThePortIsReported) {
  Command server(
      {"python3", "-c",
       "import socket\n"
       "s = socket.create_server(('127.0.0.1', " +
           std::to_string(port_) +
           "))\n"
           "print('up', flush=True)\n"
           "while True:\n"
           "    c, _ = s.accept()\n"
           "    c.sendall(b'SSH-2.0-other\\r\\n')\n"});
  ASSERT_TRUE(server.until_output("up"));
  Command b(node(1, {"true"}));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(b.err(), HasSubstr("not a launcher"));
  Command a(node(0, {"true"}));
  EXPECT_EQ(a.wait(), 2);
  EXPECT_THAT(a.err(), HasSubstr("the port is in use"));
}

// Any user of the host can take the name that keeps a port.
TEST_F(Loopback, AProcessThatHasTheNameOfAPortIsReported) {
  const std::string name = "echelon-master-127.0.0.1-" + std::to_string(port_);
  Command holder(
      {"python3", "-c",
       "import socket, time\n"
       "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
       "s.bind('\\0" +
           name +
           "')\n"
           "print('up', flush=True)\n"
           "time.sleep(600)\n"});
  ASSERT_TRUE(holder.until_output("up"));
  Command a(launch({"--master-port", std::to_string(port_)}, {"true"}));
  EXPECT_EQ(a.wait(), 2);
  EXPECT_THAT(
      a.err(), HasAll("took the name @" + name, "--master-port", "ss -xap"));
}

// However a network is cut in two, whichever hosts are dead, and however many
// of those a side knows of, at most one side goes on.
TEST(Quorum, TwoSidesNeverBothGoOn) {
  for (int members = 1; members <= 7; ++members) {
    for (int dead = 0; dead < members; ++dead) {
      for (int one = 0; one <= members - dead; ++one) {
        const int other = members - dead - one;
        for (int known = 0; known <= dead; ++known) {
          for (const bool leads : {false, true}) {
            const bool goes_on = have_quorum(one, members, known, leads);
            EXPECT_FALSE(
                goes_on && have_quorum(other, members, dead, !leads) &&
                one > 0 && other > 0)
                << members << " " << dead << " " << one << " " << known;
          }
        }
      }
    }
  }
  EXPECT_TRUE(have_quorum(2, 3, 0, false));
  EXPECT_FALSE(have_quorum(1, 3, 0, true));
  EXPECT_TRUE(have_quorum(1, 2, 0, true));
  EXPECT_FALSE(have_quorum(1, 2, 0, false));
  EXPECT_TRUE(have_quorum(1, 3, 2, false));
}

/// Launchers of one job whose hosts may come and go, on this host's loopback.
class Membership : public testing::Test {
 protected:
  std::vector<std::string>
  node(const std::string& nodes, int rank, const std::string& more = "") const {
    return node(nodes, rank, more, program());
  }
  std::vector<std::string> node(
      const std::string& nodes, int rank, const std::string& more,
      const std::vector<std::string>& program) const {
    return launch(
        words(
            "--nnodes " + nodes + " --node-rank " + std::to_string(rank) +
            " --master-addr 127.0.0.1 --master-port " + std::to_string(port_) +
            " --plain " + more),
        program);
  }
  /// Ranks that say their generation and number, save when they are told to
  /// stop, and are done when finish() was called.
  std::vector<std::string> program() const {
    return {
        "sh", "-c",
        "trap 'exit 75' TERM; echo g$ECHELON_GENERATION $RANK/$WORLD_SIZE; "
        "while ! [ -e " +
            folder_.path() + "/done ]; do sleep 0.02; done"};
  }
  void finish() const { std::ofstream(folder_.path() + "/done"); }
  static void expect_ends(const std::vector<Command*>& jobs, int exit_code) {
    for (Command* job : jobs) {
      EXPECT_EQ(job->wait(), exit_code) << job->err();
      EXPECT_TRUE(job->living().empty());
    }
  }
  int port_ = free_port();
  TempFolder folder_;
};

TEST_F(Membership, AHangIsTheLastRanksOnWhicheverHostItIs) {
  const auto stalls = rank_program({"stall", "1"});
  Command a(node("2", 0, "--max-restarts 1", stalls));
  Command b(node("2", 1, "--max-restarts 1", stalls));
  expect_ends({&a, &b}, 0);
  EXPECT_THAT(
      a.err(),
      HasAll(
          "rank 1 (node 1, 127.0.0.1) ended with SIGKILL",
          "rank 1: hangs: no rank has made progress", "restart 1 of 1"));
}

// One that saves for long, say.
TEST_F(Membership, RanksThatWaitForAnotherHostDoNotHang) {
  const auto saves = rank_program({"saves", "0"});
  Command a(node("2", 0, "--max-restarts 1", saves));
  Command b(node("2", 1, "--max-restarts 1", saves));
  expect_ends({&a, &b}, 0);
  EXPECT_EQ(a.err() + b.err(), "");
}

TEST_F(Membership, AFailedRankStartsAgainOnAllHosts) {
  const std::vector<std::string> failing = {
      "sh", "-c",
      "echo g$ECHELON_GENERATION $RANK/$WORLD_SIZE; "
      "[ $ECHELON_GENERATION -gt 0 ] && exit 0; sleep 0.5; "
      "[ $RANK = 1 ] && exit 9; "
      "sleep 1000"};
  Command a(node("2", 0, "--max-restarts 1", failing));
  Command b(node("2", 1, "--max-restarts 1", failing));
  expect_ends({&a, &b}, 0);
  EXPECT_THAT(a.out(), HasAll("g0 0/2\n", "g1 0/2\n"));
  EXPECT_THAT(b.out(), HasAll("g0 1/2\n", "g1 1/2\n"));
  EXPECT_THAT(
      a.err(), HasAll(
                   "rank 1 (node 1, 127.0.0.1) ended with exit code 9",
                   "restart 1 of 1"));
}

// The budget of restarts is the job's, whoever coordinates.
TEST_F(Membership, TheNextHostToCoordinateHasCountedRestarts) {
  const std::vector<std::string> failing = {
      "sh", "-c",
      "trap 'exit 75' TERM; echo g$ECHELON_GENERATION $RANK/$WORLD_SIZE; "
      "[ $ECHELON_GENERATION = 0 ] && [ $RANK = 1 ] && sleep 0.5 && exit 9; "
      "[ $ECHELON_GENERATION = 2 ] && sleep 0.5 && exit 8; while :; do sleep "
      "0.02; done"};
  const auto start = [&](int number) {
    return node("2:3", number, "--max-restarts 1", failing);
  };
  Command a(start(0)), b(start(1)), c(start(2));
  ASSERT_TRUE(a.until_output("g1 0/3")) << a.err();
  ASSERT_TRUE(b.until_output("g1 1/3")) << b.err();
  a.signal(SIGKILL);
  expect_ends({&b, &c}, 8);
  EXPECT_THAT(b.out() + c.out(), HasAll("g2 0/2\n", "g2 1/2\n"));
  EXPECT_EQ(count(b.out(), "g3"), 0);
}

TEST_F(Membership, ALostHostIsLeftOut) {
  Command a(node("2:3", 0)), b(node("2:3", 1)), c(node("2:3", 2));
  ASSERT_TRUE(a.until_output("g0 0/3")) << a.err();
  ASSERT_TRUE(b.until_output("g0 1/3"));
  ASSERT_TRUE(c.until_output("g0 2/3"));
  b.signal(SIGKILL);
  ASSERT_TRUE(a.until_output("g1 0/2")) << a.err();
  ASSERT_TRUE(c.until_output("g1 1/2")) << c.err();
  finish();
  expect_ends({&a, &c}, 0);
  EXPECT_THAT(
      a.err(), HasAll(
                   "the launcher of node 1 (127.0.0.1) is gone",
                   "restart 1 after a host was lost", "2 hosts, 2 ranks"));
}

// A host whose connection broke calls again, and may be heard of twice before
// the end of the first call has come.
TEST_F(Membership, AHostThatCallsTwiceIsOne) {
  Command a(node("1:3", 0));
  Command b(stranger(
      port_,
      "import json\n"
      "def call(**more):\n"
      "    s = connect()\n"
      "    prove(s)\n"
      "    s.sendall(json.dumps(dict(\n"
      "        protocol=3, nodes=3, least=1, node_rank=1, ranks=1, port=7,\n"
      "        identity='', **more)).encode() + b'\\n')\n"
      "    return s\n"
      "def told(s, key):\n"
      "    for line in s.makefile():\n"
      "        if key in json.loads(line):\n"
      "            return json.loads(line)[key]\n"
      "first = call()\n"
      "start = told(first, 'start')\n"
      "place = {key: start[key] for key in ('job', 'generation')}\n"
      "second = call(**place)\n"
      "told(second, 'waiting')\n"
      "third = call(**place)\n"
      "try:\n"
      "    while second.recv(4096):\n"
      "        pass\n"
      "except ConnectionResetError:\n"
      "    pass\n"
      "first.shutdown(socket.SHUT_RDWR)\n"
      "print('hosts', told(third, 'start')['hosts'], flush=True)\n"
      "time.sleep(60)\n"));
  ASSERT_TRUE(b.until_output("hosts")) << b.err();
  EXPECT_EQ(b.out(), "hosts 2\n");
  ASSERT_TRUE(a.until_output("g1 0/2")) << a.out() << a.err();
  b.signal(SIGKILL);
  b.wait();
  ASSERT_TRUE(a.until_output("g2 0/1")) << a.out() << a.err();
  EXPECT_EQ(count(a.out(), "g1 0/2\n"), 1);
  finish();
  expect_ends({&a}, 0);
}

TEST_F(Membership, TheFirstHostIsLostAndComesBack) {
  auto a = std::make_unique<Command>(node("2:3", 0));
  Command b(node("2:3", 1)), c(node("2:3", 2));
  ASSERT_TRUE(b.until_output("g0 1/3")) << b.err();
  ASSERT_TRUE(c.until_output("g0 2/3"));
  a->signal(SIGKILL);
  ASSERT_TRUE(b.until_output("g1 0/2")) << b.err();
  ASSERT_TRUE(c.until_output("g1 1/2")) << c.err();
  a = std::make_unique<Command>(node("2:3", 0));
  ASSERT_TRUE(a->until_output("g2 2/3")) << a->err() << b.err();
  ASSERT_TRUE(b.until_output("g2 0/3"));
  ASSERT_TRUE(c.until_output("g2 1/3"));
  finish();
  expect_ends({a.get(), &b, &c}, 0);
}

TEST_F(Membership, TheLastHostGoesOnAlone) {
  Command a(node("1:3", 0)), b(node("1:3", 1)), c(node("1:3", 2));
  ASSERT_TRUE(c.until_output("g0 2/3")) << c.err();
  a.signal(SIGSTOP);  // both are lost at once
  b.signal(SIGKILL);
  a.signal(SIGKILL);
  ASSERT_TRUE(c.until_output("0/1")) << c.err();
  finish();
  expect_ends({&c}, 0);
}

TEST_F(Membership, AHostThatComesIsTakenInOrWaits) {
  Command a(node("1:2", 0));
  ASSERT_TRUE(a.until_output("g0 0/1")) << a.err();
  Command b(node("1:2", 1));
  ASSERT_TRUE(a.until_output("g1 0/2")) << a.err();
  ASSERT_TRUE(b.until_output("g1 1/2")) << b.err();
  // By way of any host of the job.
  Command c(node("1:2", 0, "--joins yes"));
  ASSERT_TRUE(Command::until([&] {
    return c.err().find("this one waits until it is taken in") !=
           std::string::npos;
  })) << c.err();
  b.signal(SIGKILL);
  ASSERT_TRUE(a.until_output("g2 0/2")) << a.err();
  ASSERT_TRUE(c.until_output("g2 1/2")) << c.err();
  finish();
  expect_ends({&a, &c}, 0);
}

TEST_F(Membership, ASpareOutlivesTheFirstHost) {
  Command a(node("1:2", 0)), b(node("1:2", 1));
  ASSERT_TRUE(b.until_output("g0 1/2")) << b.err();
  Command c(node("1:2", 0, "--joins yes"));
  ASSERT_TRUE(Command::until([&] {
    return c.err().find("this one waits until it is taken in") !=
           std::string::npos;
  })) << c.err();
  a.signal(SIGKILL);
  ASSERT_TRUE(c.until_output("1/2")) << c.err();
  ASSERT_TRUE(b.until_output(" 0/2")) << b.err();
  finish();
  expect_ends({&b, &c}, 0);
}

TEST_F(Membership, AJobThatNeedsAllHostsWaitsForThem) {
  Command a(node("2", 0, "--max-restarts 1"));
  auto b = std::make_unique<Command>(node("2", 1, "--max-restarts 1"));
  ASSERT_TRUE(b->until_output("g0 1/2"));
  b->signal(SIGKILL);
  b->wait();
  b = std::make_unique<Command>(node("2", 1, "--max-restarts 1"));
  ASSERT_TRUE(a.until_output("g1 0/2")) << a.err();
  finish();
  expect_ends({&a, b.get()}, 0);
}

// Its connections stay open.
TEST_F(Membership, ALauncherThatIsStoppedIsLostAndComesBack) {
  Command a(node("1:3", 0)), b(node("1:3", 1)), c(node("1:3", 2));
  ASSERT_TRUE(b.until_output("g0 1/3")) << b.err();
  b.signal(SIGSTOP);
  ASSERT_TRUE(a.until_output("g1 0/2")) << a.err();
  ASSERT_TRUE(c.until_output("g1 1/2")) << c.err();
  b.signal(SIGCONT);
  ASSERT_TRUE(b.until_output("g2 2/3")) << b.err() << a.err();
  finish();
  expect_ends({&a, &b, &c}, 0);
  EXPECT_EQ(count(b.out(), "g1"), 0);
}

// Each host judges by its own clock.
TEST_F(Membership, ClocksMayDiffer) {
  const auto ahead = [](const char* seconds, std::vector<std::string> command) {
    command.insert(
        command.begin(), {"unshare", "--time", "--fork", "--kill-child",
                          "--monotonic", seconds});
    return command;
  };
  if (Command(ahead("9", {"true"})).wait() != 0) {
    GTEST_SKIP() << "this system has no time namespaces";
  }
  Command a(node("1:3", 0));
  Command b(ahead("90000", node("1:3", 1)));
  Command c(ahead("16", node("1:3", 2)));
  ASSERT_TRUE(a.until_output("g0 0/3")) << a.err();
  sleep(5);  // longer than a silence
  EXPECT_EQ(a.err() + b.err() + c.err(), "");
  c.signal(SIGKILL);  // unshare's end kills the launcher
  ASSERT_TRUE(a.until_output("g1 0/2")) << a.err();
  ASSERT_TRUE(b.until_output("g1 1/2")) << b.err();
  finish();
  expect_ends({&a, &b}, 0);
}

TEST_F(Membership, TooFewHostsEndTheJob) {
  Command a(node("2", 0, "--max-restarts 1 --join-ms 1000"));
  Command b(node("2", 1, "--max-restarts 1 --join-ms 1000"));
  ASSERT_TRUE(b.until_output("g0 1/2"));
  b.signal(SIGKILL);
  EXPECT_EQ(a.wait(), 1);
  EXPECT_THAT(last_line(a), HasAll("after 1 s 1 more host of 2 had not come"));
}

TEST_F(Membership, WithoutALayoutAHostWaits) {
  Command a(node("1:3", 0, "--most-ranks 2"));
  ASSERT_TRUE(a.until_output("g0 0/1")) << a.err();
  EXPECT_THAT(a.err(), HasSubstr("layout dp=1"));
  Command b(node("1:3", 1, "--most-ranks 2"));
  ASSERT_TRUE(b.until_output("g1 1/2")) << a.err();
  Command c(node("1:3", 2, "--most-ranks 2"));
  ASSERT_TRUE(Command::until(
      [&] { return c.err().find("this one waits") != std::string::npos; }));
  sleep(3);  // the job is not disturbed
  EXPECT_EQ(count(a.out(), "g2"), 0) << a.err();
  b.signal(SIGKILL);
  ASSERT_TRUE(c.until_output("g2 1/2")) << a.err();
  finish();
  expect_ends({&a, &c}, 0);
  EXPECT_EQ(count(a.out(), "g2"), 1);
}

TEST_F(Membership, HostsOfOtherConfigurationsAreRefused) {
  Command a(node("1:2", 0, "--identity x"));
  ASSERT_TRUE(a.until_output("g0 0/1")) << a.err();
  Command b(node("1:2", 1, "--identity y"));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(b.err(), HasSubstr("it has another configuration"));
  Command c(node("2:2", 1, "--identity x"));
  EXPECT_EQ(c.wait(), 2);
  EXPECT_THAT(c.err(), HasSubstr("--nnodes 1:2, this one has 2:2"));
  EXPECT_EQ(count(a.out(), "g0"), 1);
  EXPECT_EQ(count(a.out(), "g1"), 0);
  finish();
  expect_ends({&a}, 0);
}

/// Two hosts, each with a launcher of its own.
class Namespaces : public testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.reason().empty()) GTEST_SKIP() << hosts_.reason();
  }
  /// The launcher with these options, on a host.
  std::vector<std::string>
  on(int host, const std::string& options,
     const std::vector<std::string>& program) const {
    return hosts_.on(host, launch(words("--nnodes 2 " + options), program));
  }
  std::vector<std::string> node(
      int rank, const std::vector<std::string>& program,
      const std::string& more = "") const {
    return on(
        rank,
        "--node-rank " + std::to_string(rank) + " --master-addr " +
            TestHosts::address(0) + " -n 2 " + more,
        program);
  }
  TestHosts hosts_;
};

TEST_F(Namespaces, RanksOfTwoHostsConnect) {
  Command a(node(0, rank_program({"meet"})));
  Command b(node(1, rank_program({"meet"})));
  expect_end(a, b, 0);
  EXPECT_EQ(count(a.out(), "sum 6\n"), 2) << a.out();
  EXPECT_EQ(count(b.out(), "sum 6\n"), 2) << b.out();
}

TEST_F(Namespaces, EachHostKnowsItsOwnAddress) {
  const std::vector<std::string> program = {
      "sh", "-c", "echo $MASTER_ADDR $ECHELON_NODE_ADDRESS"};
  Command a(node(0, program));
  Command b(node(1, program));
  expect_end(a, b, 0);
  EXPECT_THAT(a.out(), HasSubstr("[0] 10.83.0.1 10.83.0.1\n"));
  EXPECT_THAT(b.out(), HasSubstr("[3] 10.83.0.1 10.83.0.2\n"));
}

TEST_F(Namespaces, TheStoreListensOnTheMastersAddressAlone) {
  Command a(node(0, rank_program({"listen"}), "--listen"));
  Command b(node(1, rank_program({"listen"}), "--listen"));
  ASSERT_TRUE(a.until_output("listening"));
  Command sockets(hosts_.on(0, {"cat", "/proc/net/tcp", "/proc/net/tcp6"}));
  EXPECT_EQ(sockets.wait(), 0);
  int listening = 0;
  std::istringstream lines(sockets.out());
  for (std::string line; std::getline(lines, line);) {
    if (line.find(" 0A ") != std::string::npos) {
      ++listening;
      EXPECT_THAT(line, HasSubstr("0100530A:")) << "10.83.0.1";
    }
  }
  EXPECT_EQ(listening, 2) << "the launcher's and the store's";
}

TEST_F(Namespaces, AHostWithoutARouteSaysSo) {
  Command a(on(1, "--node-rank 1 --master-addr 203.0.113.5", {"true"}));
  EXPECT_EQ(a.wait(), 2);
  EXPECT_THAT(
      a.err(), HasSubstr("203.0.113.5, port 29500: Network is unreachable"));
  Command b(
      on(1, "--node-rank 0 --master-addr " + TestHosts::address(0), {"true"}));
  EXPECT_EQ(b.wait(), 2);
  EXPECT_THAT(b.err(), HasAll("not an address of this host", "10.83.0.2"));
}

/// Their system knows the names of a table alone.
class Names : public Namespaces {
 protected:
  void SetUp() override {
    Namespaces::SetUp();
    std::ofstream(table_) << "127.0.0.1 localhost\n";
    std::ofstream(folder_.path() + "/switch") << "hosts: files\n";
  }
  std::vector<std::string> named(
      int rank, const std::vector<std::string>& program,
      const std::string& more = "") const {
    return hosts_.on(
        rank,
        std::vector<std::string>{
            "sh", "-c",
            "mount --bind " + table_ + " /etc/hosts && mount --bind " +
                folder_.path() + "/switch /etc/nsswitch.conf && exec \"$@\"",
            "sh"} +
            launch(
                words(
                    "--nnodes 2 --master-addr first-0 --node-rank " +
                    std::to_string(rank) + " " + more),
                program));
  }
  TempFolder folder_;
  std::string table_ = folder_.path() + "/hosts";
};

// In Kubernetes it comes seconds after the pod.
TEST_F(Names, OfTheMasterMayComeLater) {
  Command a(named(0, rank_program({"meet"}), "--name-may-come yes"));
  Command b(named(1, rank_program({"meet"}), "--name-may-come yes"));
  for (Command* one : {&a, &b}) {
    EXPECT_TRUE(Command::until([&] {
      return one->err().find("waiting for the name first-0 (") !=
             std::string::npos;
    })) << one->err();
  }
  std::ofstream(table_, std::ios::app) << TestHosts::address(0) << " first-0\n";
  expect_end(a, b, 0);
  EXPECT_EQ(count(a.err(), "waiting for the name"), 1) << a.err();
}

TEST_F(Names, OfTheMasterAreNotWaitedForForEver) {
  for (const int rank : {0, 1}) {
    Command a(named(rank, {"true"}, "--name-may-come yes --join-ms 300"));
    EXPECT_EQ(a.wait(), 2);
    EXPECT_THAT(
        a.err(), HasAll("\"first-0\": ", ", for 0.3 s; give its number"));
  }
  Command number(
      on(1, "--name-may-come yes --master-addr 10.83.0.300 --node-rank 1",
         {"true"}));
  EXPECT_EQ(number.wait(), 2);
  EXPECT_THAT(number.err(), HasSubstr("\"10.83.0.300\""));
}

// A mistyped one must not cost five minutes.
TEST_F(Names, ThatDoNotExistAreRefusedAtOnce) {
  for (const int rank : {0, 1}) {
    Command a(named(rank, {"true"}));
    EXPECT_EQ(a.wait(), 2) << a.err();
    EXPECT_THAT(
        a.err(),
        HasSubstr(
            "master address \"first-0\": Name or service not known; give"));
  }
}

TEST_F(Namespaces, ACutCableEndsTheJobOnBothHosts) {
  Command a(node(0, rank_program({"wait"})));
  Command b(node(1, rank_program({"wait"})));
  ASSERT_TRUE(a.until_output("ready", 2));
  ASSERT_TRUE(b.until_output("ready", 2));
  hosts_.cut(1);
  expect_end(a, b, 1);
  EXPECT_THAT(last_line(a), HasSubstr("node 1 (10.83.0.2) is gone"));
  EXPECT_THAT(last_line(b), HasSubstr("node 0 (10.83.0.1) is gone"));
}

/// Hosts of a job that goes on with some of them.
class CutHosts : public Membership {
 protected:
  void use_hosts(int number) {
    number_ = number;
    hosts_ = std::make_unique<TestHosts>(number);
  }
  std::vector<std::string> on(int host) const {
    return hosts_->on(
        host, launch(
                  words(
                      "--nnodes 1:" + std::to_string(number_) +
                      " --plain --node-rank " + std::to_string(host) +
                      " --master-addr " + TestHosts::address(0)),
                  program()));
  }
  static void expect_alone(Command& cut) {
    EXPECT_TRUE(Command::until([&] {
      return cut.err().find("this host looks for the others") !=
             std::string::npos;
    })) << cut.err();
    EXPECT_EQ(count(cut.out(), "g1"), 0);
  }
  int number_ = 0;
  std::unique_ptr<TestHosts> hosts_;
};

// The side of one host ends its ranks, and none start there: a job never goes
// on in two places.
TEST_F(CutHosts, TheMajorityGoesOnAndTheOtherComesBack) {
  use_hosts(3);
  if (!hosts_->reason().empty()) GTEST_SKIP() << hosts_->reason();
  for (const int victim : {2, 0}) {
    Command a(on(0)), b(on(1)), c(on(2));
    std::vector<Command*> all = {&a, &b, &c};
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(all[i]->until_output("g0 " + std::to_string(i) + "/3"))
          << all[i]->err();
    }
    hosts_->cut(victim);
    Command* cut = all[victim];
    all.erase(all.begin() + victim);
    ASSERT_TRUE(all[0]->until_output("g1 0/2")) << all[0]->err();
    ASSERT_TRUE(all[1]->until_output("g1 1/2")) << all[1]->err();
    expect_alone(*cut);
    hosts_->mend(victim);
    ASSERT_TRUE(cut->until_output("g2 2/3")) << cut->err() << all[0]->err();
    ASSERT_TRUE(all[0]->until_output("g2 0/3"));
    finish();
    expect_ends({&a, &b, &c}, 0);
    EXPECT_EQ(count(cut->out(), "g1"), 0);
    std::filesystem::remove(folder_.path() + "/done");
  }
}

// Two hosts are left, each alone, and the others are dead: neither goes on
// before it has found the other. The dead count for no side.
TEST_F(CutHosts, DeadHostsHaveNoVote) {
  use_hosts(4);
  if (!hosts_->reason().empty()) GTEST_SKIP() << hosts_->reason();
  Command a(on(0)), b(on(1)), c(on(2)), d(on(3));
  std::vector<Command*> all = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(all[i]->until_output("g0 " + std::to_string(i) + "/4"))
        << all[i]->err();
  }
  hosts_->cut(3);
  a.signal(SIGKILL);
  b.signal(SIGKILL);
  ASSERT_TRUE(Command::until([&] {
    return c.err().find("1 of 4 are here, which may not go on alone") !=
           std::string::npos;
  })) << c.out()
      << c.err();
  EXPECT_EQ(count(c.out(), "g1"), 0);
  hosts_->mend(3);
  ASSERT_TRUE(c.until_output("g1 0/2")) << c.err();
  ASSERT_TRUE(d.until_output("g1 1/2")) << d.err();
  finish();
  expect_ends({&c, &d}, 0);
}

// Those that all others would call first, as when a rack loses its switch.
TEST_F(CutHosts, ThoseWithTheLowestNumbersAreLost) {
  constexpr int kCut = 5;
  constexpr int kHosts = 11;
  use_hosts(kHosts);
  if (!hosts_->reason().empty()) GTEST_SKIP() << hosts_->reason();
  std::vector<std::unique_ptr<Command>> all;
  for (int i = 0; i < kHosts; ++i) {
    all.push_back(std::make_unique<Command>(on(i)));
  }
  for (int i = 0; i < kHosts; ++i) {
    ASSERT_TRUE(all[i]->until_output("g0 " + std::to_string(i) + "/11"))
        << all[i]->err();
  }
  for (int i = 0; i < kCut; ++i) hosts_->cut(i);
  std::vector<Command*> others;
  for (int i = kCut; i < kHosts; ++i) {
    others.push_back(all[i].get());
    ASSERT_TRUE(all[i]->until_output("g1 " + std::to_string(i - kCut) + "/6"))
        << all[i]->err();
  }
  for (int i = 0; i < kCut; ++i) expect_alone(*all[i]);
  finish();
  expect_ends(others, 0);
}

}  // namespace echelon::testing_support::launch_hosts_test
