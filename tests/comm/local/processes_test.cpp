// The local backend between processes: the program starts itself once per rank.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "echelon/comm/local/local.h"
#include "tests/comm/local/cases.h"

extern char** environ;

namespace echelon::local {
namespace processes_test {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// ---- what a rank's process runs

struct Me {
  std::shared_ptr<Host> host;
  BackendPtr world;
  int rank;
  int size;

  // A line for the parent, at once.
  void say(const std::string& line) const {
    const std::string text = line + "\n";
    (void)!write(STDOUT_FILENO, text.data(), text.size());
  }
  BackendPtr group(
      const std::string& name, std::chrono::milliseconds timeout = 60s) const {
    std::vector<int> ranks(size);
    for (int r = 0; r < size; ++r) {
      ranks[r] = r;
    }
    return make_backend(host, ranks, name, timeout);
  }
};

std::string kind_of(const std::exception& error) {
  if (dynamic_cast<const PeerLost*>(&error)) return "PeerLost";
  if (dynamic_cast<const Timeout*>(&error)) return "Timeout";
  if (dynamic_cast<const Mismatch*>(&error)) return "Mismatch";
  if (dynamic_cast<const Aborted*>(&error)) return "Aborted";
  return "other";
}

std::string missing_of(const std::exception& error) {
  std::string text;
  if (const auto* failure = dynamic_cast<const Failure*>(&error)) {
    for (const int r : failure->missing()) {
      text += std::to_string(r) + ";";
    }
  }
  return text;
}

// The steady clock, which all processes of a host share.
int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void report(const Me& me, const std::exception& error) {
  const int64_t now = now_us();
  me.say(
      "error " + kind_of(error) + " missing " + missing_of(error) + " at " +
      std::to_string(now) + " " + error.what());
}

void all_values(Me& me) {
  testing::reductions(*me.world);
  testing::movements(*me.world);
  testing::lists(*me.world);
  testing::messages(*me.world);
  testing::many_in_flight(*me.world);
  if (me.size > 1) {
    testing::mismatches(*me.world);
  }
}

// Until something fails: big collectives, while a receive and another group's
// collective are pending that only the victim could complete.
void until_failure(Me& me) {
  const int victim = 2;
  auto side = me.group("side");
  Tensors never = {at::zeros({4})};
  Tensors more = {at::zeros({4})};
  c10::intrusive_ptr<c10d::Work> receive;
  c10::intrusive_ptr<c10d::Work> pending;
  if (me.rank != victim) {
    receive = side->recv(never, victim, 1);
    pending = side->allreduce(more, {});
  }
  Tensors big = {at::zeros({16 << 20})};
  me.world->allreduce(big, {})->wait(0ms);
  me.say("running");
  try {
    for (;;) {
      me.world->allreduce(big, {})->wait(0ms);
    }
  } catch (const std::exception& error) {
    report(me, error);
  }
  for (const auto& work : {receive, pending}) {
    try {
      work->wait(0ms);
    } catch (const std::exception& error) {
      report(me, error);
    }
  }
  try {
    me.world->allreduce(big, {})->wait(0ms);
  } catch (const std::exception& error) {
    report(me, error);
  }
}

// All but the victim wait in a small collective that it never calls.
void until_idle_failure(Me& me) {
  Tensors t = {at::zeros({16})};
  me.world->allreduce(t, {})->wait(0ms);
  me.say("running");
  if (me.rank == 2) {
    for (;;) pause();
  }
  try {
    me.world->allreduce(t, {})->wait(0ms);
  } catch (const std::exception& error) {
    report(me, error);
  }
}

void with_deadline(Me& me) {
  auto group = me.group("short", 1500ms);
  Tensors t = {at::zeros({me.size > 2 ? 4 << 20 : 16})};
  group->allreduce(t, {})->wait(0ms);
  me.say("running");
  try {
    for (;;) {
      group->allreduce(t, {})->wait(0ms);
    }
  } catch (const std::exception& error) {
    report(me, error);
  }
}

void leaves_early(Me& me) {
  Tensors t = {at::ones({4})};
  me.world->allreduce(t, {})->wait(0ms);
  me.say("running");
  if (me.rank == 1) {
    return;
  }
  try {
    me.world->allreduce(t, {})->wait(0ms);
  } catch (const std::exception& error) {
    report(me, error);
  }
  // Stays until the other one has its error too.
  me.host->publish_status("told");
  while (me.host->read_status(2 - me.rank) != "told") {
    std::this_thread::yield();
  }
}

void groups_come_and_go(Me& me) {
  for (int i = 0; i < 200; ++i) {
    // Halves at the same time, then all; the same names again and again.
    std::vector<int> half;
    for (int r = me.rank % 2; r < me.size; r += 2) {
      half.push_back(r);
    }
    auto mine = make_backend(me.host, half, "half", 60s);
    Tensors t = {at::ones({i % 3 == 0 ? 100000 : 10})};
    mine->allreduce(t, {})->wait(0ms);
    auto all = me.group("all");
    Tensors one = {at::ones({1})};
    auto sending = all->send(one, (me.rank + 1) % me.size, 0);
    Tensors other = {at::zeros({1})};
    all->recv(other, (me.rank + me.size - 1) % me.size, 0)->wait(0ms);
    sending->wait(0ms);
    all->allreduce(one, {})->wait(0ms);
    if (t[0][0].item<float>() != half.size() ||
        one[0].item<float>() != me.size) {
      throw std::runtime_error("wrong sum in round " + std::to_string(i));
    }
  }
}

void reads_status(Me& me) {
  me.host->publish_status("rank " + std::to_string(me.rank) + " is here");
  me.world->barrier({})->wait(0ms);
  for (int r = 0; r < me.size; ++r) {
    if (me.host->read_status(r) != "rank " + std::to_string(r) + " is here") {
      throw std::runtime_error("status: " + me.host->read_status(r));
    }
  }
  me.world->barrier({})->wait(0ms);
}

void shares_in_place(Me& me) {
  // The allocator's blocks are in the arena: the sum is made in place.
  auto t = at::ones({1 << 20});
  Tensors list = {t};
  me.world->allreduce(list, {})->wait(0ms);
  // Memory of another allocator on one rank alone: all take the staged path.
  std::vector<float> plain(1 << 20, 1.0f);
  list = {
      me.rank == 0 ? at::from_blob(plain.data(), {1 << 20})
                   : at::ones({1 << 20})};
  me.world->allreduce(list, {})->wait(0ms);
  if (t[5].item<float>() != me.size || list[0][5].item<float>() != me.size) {
    throw std::runtime_error("wrong sum");
  }
  // LibTorch's own scratch memory: the same allocator, without a tensor.
  for (const size_t bytes : {size_t{0}, size_t{100}, size_t{1} << 20}) {
    auto* allocator = c10::GetCPUAllocator();
    allocator->raw_deallocate(allocator->raw_allocate(bytes));
  }
  // Blocks come and go, the allocator joins them again.
  for (int i = 0; i < 100; ++i) {
    Tensors some;
    for (int k = 0; k < 10; ++k) {
      some.push_back(at::full({(i * 37 + k * 1009) % 300000 + 20000}, 1.0f));
    }
    list = {some[i % 10]};
    me.world->allreduce(list, {})->wait(0ms);
    if (list[0][19999].item<float>() != me.size) {
      throw std::runtime_error("wrong sum");
    }
  }
}

// A follower of this thread's memory is told about the arena's blocks.
struct Reported : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(
      void* data, int64_t bytes, size_t, size_t, c10::Device) override {
    now[data] += bytes;
  }
  bool memoryProfilingEnabled() const override { return false; }
  std::map<void*, int64_t> now;
};

void reports_blocks(Me&) {
  const auto reported = std::make_shared<Reported>();
  auto before = at::ones({1 << 20});
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reported);
  void* data = nullptr;
  {
    const auto block = at::ones({1 << 20});
    data = block.data_ptr();
    if (reported->now[data] != 4 << 20) throw std::runtime_error("not seen");
  }
  if (reported->now[data] != 0) throw std::runtime_error("not freed");
}

const std::map<std::string, std::function<void(Me&)>> kRoles = {
    {"all_values", all_values},
    {"until_failure", until_failure},
    {"until_idle_failure", until_idle_failure},
    {"with_deadline", with_deadline},
    {"leaves_early", leaves_early},
    {"groups_come_and_go", groups_come_and_go},
    {"reads_status", reads_status},
    {"shares_in_place", shares_in_place},
    {"reports_blocks", reports_blocks},
};

// Not a test: the body of a rank's process.
TEST(Rank, DISABLED_Process) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  std::istringstream arguments(std::getenv("ECHELON_LOCAL_TEST"));
  std::string role, folder;
  Me me;
  int share = 0;
  int join_ms = 0;
  arguments >> role >> me.rank >> me.size >> share >> join_ms >> folder;
  try {
    auto store =
        c10::make_intrusive<c10d::FileStore>(folder + "/store", me.size);
    me.host = join_processes(
        store, "test/0", me.rank, me.size,
        {.share_tensors = share != 0,
         .timeout = std::chrono::milliseconds(join_ms)});
    me.world = me.group("world");
    kRoles.at(role)(me);
    me.say("done");
  } catch (const std::exception& error) {
    report(me, error);
  }
  std::fflush(nullptr);
}

// ---- the parent

class Ranks {
 public:
  Ranks(
      const std::string& role, int size, bool share = false,
      std::vector<int> present = {}, std::chrono::milliseconds join = 60s)
      : size_(size), pids_(size, 0), outputs_(size, -1), texts_(size) {
    char pattern[] = "/tmp/echelon-local-XXXXXX";
    folder_ = mkdtemp(pattern);
    for (int r = 0; r < size; ++r) {
      if (present.empty() ||
          std::count(present.begin(), present.end(), r) > 0) {
        start(role, r, share, join);
      }
    }
  }
  ~Ranks() {
    for (int r = 0; r < size_; ++r) {
      if (pids_[r] > 0) {
        ::kill(pids_[r], SIGKILL);
        waitpid(pids_[r], nullptr, 0);
      }
      close(outputs_[r]);
    }
    std::filesystem::remove_all(folder_);
  }

  pid_t pid(int r) const { return pids_[r]; }
  void signal(int r, int number) { ::kill(pids_[r], number); }

  // Reads until the rank has said `word`; false when its output ends first.
  bool wait_for(int r, const std::string& word) {
    while (texts_[r].find(word) == std::string::npos) {
      pollfd polled{outputs_[r], POLLIN, 0};
      if (poll(&polled, 1, 120000) <= 0 || !read_some(r)) {
        return false;
      }
    }
    return true;
  }
  // Everything the rank said, when it has ended.
  const std::string& text(int r) {
    while (read_some(r)) {
    }
    return texts_[r];
  }
  int num(int r, const std::string& word) {
    const std::string& all = text(r);
    int num = 0;
    for (size_t at = all.find(word); at != std::string::npos;
         at = all.find(word, at + 1)) {
      ++num;
    }
    return num;
  }
  void expect_done() {
    for (int r = 0; r < size_; ++r) {
      EXPECT_EQ(num(r, "done\n"), 1) << "rank " << r << " said:\n" << text(r);
    }
  }

 private:
  void start(
      const std::string& role, int r, bool share,
      std::chrono::milliseconds join) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    outputs_[r] = ends[0];
    const std::string variable =
        "ECHELON_LOCAL_TEST=" + role + " " + std::to_string(r) + " " +
        std::to_string(size_) + " " + std::to_string(share) + " " +
        std::to_string(join.count()) + " " + folder_;
    std::vector<char*> environment = {const_cast<char*>(variable.c_str())};
    for (char** e = environ; *e != nullptr; ++e) {
      environment.push_back(*e);
    }
    environment.push_back(nullptr);
    char program[] = "/proc/self/exe";
    char filter[] = "--gtest_filter=Rank.DISABLED_Process";
    char disabled[] = "--gtest_also_run_disabled_tests";
    char* arguments[] = {program, filter, disabled, nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    ASSERT_EQ(
        posix_spawn(
            &pids_[r], program, &actions, nullptr, arguments,
            environment.data()),
        0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
  }

  bool read_some(int r) {
    char buffer[4096];
    const ssize_t got = read(outputs_[r], buffer, sizeof(buffer));
    if (got > 0) {
      texts_[r].append(buffer, got);
    }
    return got > 0;
  }

  int size_;
  std::string folder_;
  std::vector<pid_t> pids_;
  std::vector<int> outputs_;
  std::vector<std::string> texts_;
};

class Processes : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Processes, Values) {
  const auto [size, share] = GetParam();
  Ranks ranks("all_values", size, share);
  ranks.expect_done();
}
INSTANTIATE_TEST_SUITE_P(
    Staged, Processes,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 4, 8), ::testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(
    Shared, Processes,
    ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Values(true)));

TEST(Processes, ShareTensorsInPlace) {
  Ranks ranks("shares_in_place", 3, true);
  ranks.expect_done();
}

TEST(Processes, BlocksThatAreSharedAreReported) {
  Ranks ranks("reports_blocks", 2, true);
  ranks.expect_done();
}

TEST(Processes, GroupsComeAndGo) {
  Ranks ranks("groups_come_and_go", 4);
  ranks.expect_done();
}

TEST(Processes, Status) {
  Ranks ranks("reads_status", 3);
  ranks.expect_done();
}

class Death : public ::testing::TestWithParam<bool> {};

TEST_P(Death, FailsEverythingOfEverySurvivor) {
  Ranks ranks("until_failure", 4, GetParam());
  for (int r = 0; r < 4; ++r) {
    ASSERT_TRUE(ranks.wait_for(r, "running")) << ranks.text(r);
  }
  ranks.signal(2, SIGKILL);
  const std::string lost =
      "rank 2 of this host (pid " + std::to_string(ranks.pid(2)) + ") was lost";
  for (const int r : {0, 1, 3}) {
    // The collective, the pending receive, the other group's, and a later one.
    EXPECT_EQ(ranks.num(r, "error PeerLost missing 2;"), 4) << ranks.text(r);
    EXPECT_EQ(ranks.num(r, lost), 4) << ranks.text(r);
  }
}
INSTANTIATE_TEST_SUITE_P(StagedAndShared, Death, ::testing::Bool());

// Death is noticed by itself, long before the time-out of 60 s: its error is
// another one. How long it took is printed.
TEST(Processes, PrintsTheTimeToNoticeADeath) {
  for (const std::string role : {"until_failure", "until_idle_failure"}) {
    std::vector<double> milliseconds;
    for (int round = 0; round < 2; ++round) {
      Ranks ranks(role, 4);
      for (int r = 0; r < 4; ++r) {
        ASSERT_TRUE(ranks.wait_for(r, "running")) << ranks.text(r);
      }
      const int64_t killed = now_us();
      ranks.signal(2, SIGKILL);
      for (const int r : {0, 1, 3}) {
        const std::string start = "error PeerLost missing 2; at ";
        const std::string& text = ranks.text(r);
        const size_t at = text.find(start);
        ASSERT_NE(at, std::string::npos) << text;
        milliseconds.push_back(
            (std::stoll(text.substr(at + start.size())) - killed) / 1e3);
      }
    }
    std::sort(milliseconds.begin(), milliseconds.end());
    printf(
        "%s: a death is noticed after %.1f ms (median of %zu), %.1f ms at "
        "most\n",
        role == "until_failure" ? "in collectives of 64 MiB"
                                : "waiting in a small collective",
        milliseconds[milliseconds.size() / 2], milliseconds.size(),
        milliseconds.back());
  }
}

class Stop : public ::testing::TestWithParam<int> {};

TEST_P(Stop, TimesOutNamingTheRank) {
  const int size = GetParam();
  Ranks ranks("with_deadline", size);
  for (int r = 0; r < size; ++r) {
    ASSERT_TRUE(ranks.wait_for(r, "running")) << ranks.text(r);
  }
  ranks.signal(1, SIGSTOP);
  for (int r = 0; r < size; ++r) {
    if (r != 1) {
      EXPECT_EQ(ranks.num(r, "error Timeout missing 1;"), 1) << ranks.text(r);
      EXPECT_EQ(ranks.num(r, "not arrived: rank 1"), 1) << ranks.text(r);
    }
  }
  ranks.signal(1, SIGCONT);
  EXPECT_EQ(ranks.num(1, "error "), 1) << ranks.text(1);
}
INSTANTIATE_TEST_SUITE_P(Sizes, Stop, ::testing::Values(2, 4));

TEST(Processes, LeavingOnPurposeEndsTheOthersWait) {
  Ranks ranks("leaves_early", 3);
  for (const int r : {0, 2}) {
    EXPECT_EQ(ranks.num(r, "error PeerLost missing 1;"), 1) << ranks.text(r);
    EXPECT_EQ(ranks.num(r, "has left the job"), 1) << ranks.text(r);
  }
  EXPECT_EQ(ranks.num(1, "done\n"), 1) << ranks.text(1);
}

TEST(Processes, JoiningNamesMissingRanks) {
  Ranks ranks("reads_status", 4, false, {0, 2}, 2s);
  for (const int r : {0, 2}) {
    EXPECT_EQ(ranks.num(r, "error Timeout missing 1;3;"), 1) << ranks.text(r);
    EXPECT_EQ(ranks.num(r, "missing: rank 1, 3"), 1) << ranks.text(r);
  }
}

}  // namespace processes_test
}  // namespace echelon::local
