// The local backend between processes: the program forks once for each rank.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <thread>

#include "echelon/comm/local/local.h"
#include "echelon/text/format.h"
#include "tests/comm/local/cases.h"
#include "tests/support/process.h"

namespace echelon::local::processes_test {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using testing_support::Command;

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
    std::iota(ranks.begin(), ranks.end(), 0);
    return make_backend(host, ranks, name, timeout);
  }
};

// A sum in place, waited for.
void sum(const BackendPtr& group, const at::Tensor& tensor) {
  Tensors list = {tensor};
  group->allreduce(list, {})->wait(0ms);
}

std::string kind_of(const std::exception& error) {
  if (dynamic_cast<const PeerLost*>(&error)) return "PeerLost";
  if (dynamic_cast<const Timeout*>(&error)) return "Timeout";
  if (dynamic_cast<const Mismatch*>(&error)) return "Mismatch";
  if (dynamic_cast<const Aborted*>(&error)) return "Aborted";
  return "other";
}

// The steady clock, which all processes of a host share.
int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Runs `body` and tells the parent of its error.
void attempt(const Me& me, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    const int64_t now = now_us();
    std::string missing;
    if (const auto* failure = dynamic_cast<const Failure*>(&error)) {
      for (const int r : failure->missing()) missing += format("{};", r);
    }
    me.say(format(
        "error {} missing {} at {} {}", kind_of(error), missing, now,
        error.what()));
  }
}

void all_values(Me& me) {
  for (const auto& test : testing::cases()) test.run(*me.world);
}

// Makes big collectives until something fails, while a receive and another
// group's collective are pending that only the victim could complete.
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
  const auto big = at::zeros({16 << 20});
  sum(me.world, big);
  me.say("running");
  attempt(me, [&] {
    for (;;) sum(me.world, big);
  });
  for (const auto& work : {receive, pending}) {
    attempt(me, [&] { work->wait(0ms); });
  }
  attempt(me, [&] { sum(me.world, big); });
}

// All but the victim wait in a small collective that it never calls.
void until_idle_failure(Me& me) {
  const auto t = at::zeros({16});
  sum(me.world, t);
  me.say("running");
  if (me.rank == 2) {
    for (;;) pause();
  }
  attempt(me, [&] { sum(me.world, t); });
}

void with_deadline(Me& me) {
  auto group = me.group("short", 1500ms);
  const auto t = at::zeros({me.size > 2 ? 4 << 20 : 16});
  sum(group, t);
  me.say("running");
  attempt(me, [&] {
    for (;;) sum(group, t);
  });
}

void leaves_early(Me& me) {
  const auto t = at::ones({4});
  sum(me.world, t);
  me.say("running");
  if (me.rank == 1) return;
  attempt(me, [&] { sum(me.world, t); });
  // Stays until the other one has its error too.
  me.host->publish_status("told");
  while (me.host->read_status(2 - me.rank) != "told") std::this_thread::yield();
}

void groups_come_and_go(Me& me) {
  for (int i = 0; i < 200; ++i) {
    // Halves at the same time, then all; the same names again and again.
    std::vector<int> half;
    for (int r = me.rank % 2; r < me.size; r += 2) half.push_back(r);
    auto mine = make_backend(me.host, half, "half", 60s);
    const auto t = at::ones({i % 3 == 0 ? 100000 : 10});
    sum(mine, t);
    auto all = me.group("all");
    Tensors one = {at::ones({1})};
    auto sending = all->send(one, (me.rank + 1) % me.size, 0);
    Tensors other = {at::zeros({1})};
    all->recv(other, (me.rank + me.size - 1) % me.size, 0)->wait(0ms);
    sending->wait(0ms);
    sum(all, one[0]);
    if (t[0].item<float>() != half.size() || one[0].item<float>() != me.size) {
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
  const auto t = at::ones({1 << 20});
  sum(me.world, t);
  // Memory of another allocator on one rank alone: all take the staged path.
  std::vector<float> plain(1 << 20, 1.0f);
  const auto mixed = me.rank == 0 ? at::from_blob(plain.data(), {1 << 20})
                                  : at::ones({1 << 20});
  sum(me.world, mixed);
  if (t[5].item<float>() != me.size || mixed[5].item<float>() != me.size) {
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
    const auto& one = some[i % 10];
    sum(me.world, one);
    if (one[19999].item<float>() != me.size) {
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

// The body of a rank's process.
int run_rank(
    const std::string& role, Me me, const std::string& folder,
    const JoinOptions& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  attempt(me, [&] {
    auto store =
        c10::make_intrusive<c10d::FileStore>(folder + "/store", me.size);
    me.host = join_processes(store, "test/0", me.rank, me.size, options);
    me.world = me.group("world");
    kRoles.at(role)(me);
    me.say("done");
  });
  return 0;
}

// ---- the parent

class Ranks {
 public:
  Ranks(
      const std::string& role, int size, bool share = false,
      const std::vector<int>& present = {},
      std::chrono::milliseconds join = 60s)
      : ranks_(size) {
    for (int r = 0; r < size; ++r) {
      if (present.empty() ||
          std::count(present.begin(), present.end(), r) > 0) {
        ranks_[r] = std::make_unique<Command>([&] {
          return run_rank(
              role, {.rank = r, .size = size}, folder_.path(),
              {.share_tensors = share, .timeout = join});
        });
      }
    }
  }

  pid_t pid(int r) const { return ranks_[r]->pid(); }
  void signal(int r, int number) { ranks_[r]->signal(number); }

  /// Waits until every rank has said that it is running.
  void expect_running() const {
    for (const auto& rank : ranks_) {
      ASSERT_TRUE(rank->until_output("running")) << rank->out() << rank->err();
    }
  }
  /// Everything the rank said, when it has ended.
  std::string text(int r) {
    ranks_[r]->wait(std::chrono::minutes(10));
    return ranks_[r]->out() + ranks_[r]->err();
  }
  int num(int r, const std::string& word) {
    return testing_support::count(text(r), word);
  }
  void expect_done() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      EXPECT_EQ(num(r, "done\n"), 1) << "rank " << r << " said:\n" << text(r);
    }
  }

 private:
  testing_support::TempFolder folder_;
  std::vector<std::unique_ptr<Command>> ranks_;  // null: not present
};

class Processes : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Processes, Values) {
  const auto [size, share] = GetParam();
  Ranks("all_values", size, share).expect_done();
}
INSTANTIATE_TEST_SUITE_P(
    Staged, Processes,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 4, 8), ::testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(
    Shared, Processes,
    ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Values(true)));

TEST(Processes, ShareTensorsInPlace) {
  Ranks("shares_in_place", 3, true).expect_done();
}

TEST(Processes, BlocksThatAreSharedAreReported) {
  Ranks("reports_blocks", 2, true).expect_done();
}

TEST(Processes, GroupsComeAndGo) {
  Ranks("groups_come_and_go", 4).expect_done();
}

TEST(Processes, Status) {
  Ranks("reads_status", 3).expect_done();
}

class Death : public ::testing::TestWithParam<bool> {};

TEST_P(Death, FailsEverythingOfEverySurvivor) {
  Ranks ranks("until_failure", 4, GetParam());
  ASSERT_NO_FATAL_FAILURE(ranks.expect_running());
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
      ASSERT_NO_FATAL_FAILURE(ranks.expect_running());
      const int64_t killed = now_us();
      ranks.signal(2, SIGKILL);
      for (const int r : {0, 1, 3}) {
        const std::string start = "error PeerLost missing 2; at ";
        const std::string text = ranks.text(r);
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
  ASSERT_NO_FATAL_FAILURE(ranks.expect_running());
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

}  // namespace echelon::local::processes_test
