// The local backend's core between threads, without LibTorch: small enough to
// run under the thread sanitizer.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <functional>
#include <numeric>
#include <thread>

#include "echelon/comm/shared_memory/attachment.h"
#include "echelon/comm/shared_memory/communicator.h"
#include "echelon/comm/shared_memory/failure.h"
#include "tests/comm/shared_memory/thread_ranks.h"

namespace echelon::local::core_test {

using namespace std::chrono_literals;
using CommunicatorPtr = std::shared_ptr<Communicator>;
using ::testing::HasSubstr;
using testing::require;
using testing::run_threads;
using testing::thrown_by;

void wait(const OperationPtr& operation) {
  operation->wait();
  if (operation->error() != nullptr) std::rethrow_exception(operation->error());
}

Shape floats(uint64_t count) {
  return Shape::flat(count, Dtype::float32);
}

CommunicatorPtr group_of(
    const std::shared_ptr<Host>& host, const std::string& name,
    std::chrono::milliseconds timeout = 60s) {
  std::vector<int> ranks(host->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return Communicator::create(host, ranks, name, timeout);
}

class Core : public ::testing::TestWithParam<int> {};

TEST_P(Core, Collectives) {
  run_threads(GetParam(), [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    const int rank = host->rank();
    const int size = host->size();
    for (const uint64_t n : {0ul, 1ul, 1000ul, 20000ul, 300001ul}) {
      const std::string where = " of " + std::to_string(n);
      std::vector<float> sum(n, rank + 1.0f);
      wait(group->all_reduce(sum.data(), floats(n), Reduction::sum, {}));
      for (const float v : sum) {
        require(v == size * (size + 1) / 2, "all_reduce" + where);
      }
      std::vector<float> mine(n, rank);
      std::vector<float> all(n * size, -1);
      std::vector<Piece> slices;
      for (int j = 0; j < size; ++j) {
        slices.push_back({reinterpret_cast<char*>(all.data() + j * n), n});
      }
      wait(group->all_gather(mine.data(), slices, floats(n), {}));
      for (uint64_t i = 0; i < n * size; ++i) {
        require(all[i] == i / n, "all_gather" + where);
      }
      wait(group->reduce_scatter(
          slices, mine.data(), floats(n), Reduction::avg, {}));
      for (const float v : mine) require(v == rank, "reduce_scatter" + where);
      std::vector<float> theirs(n * size, -1);
      std::vector<Piece> receives;
      for (int j = 0; j < size; ++j) {
        std::fill_n(all.begin() + j * n, n, rank * 100 + j);
        receives.push_back({reinterpret_cast<char*>(theirs.data() + j * n), n});
      }
      wait(group->all_to_all(slices, receives, Dtype::float32, {}));
      for (uint64_t i = 0; i < n * size; ++i) {
        require(theirs[i] == i / n * 100 + rank, "all_to_all" + where);
      }
      const int root = size - 1;
      mine.assign(n, rank == root ? 5 : 0);
      wait(group->broadcast(mine.data(), floats(n), root, {}));
      wait(group->scatter(
          rank == root ? slices : std::vector<Piece>{}, mine.data(), floats(n),
          root, {}));
      for (const float v : mine) {
        require(v == root * 100 + rank, "scatter" + where);
      }
      wait(group->gather(
          mine.data(), rank == root ? slices : std::vector<Piece>{}, floats(n),
          root, {}));
      wait(group->barrier({}));
    }
  });
}

TEST_P(Core, Messages) {
  run_threads(GetParam(), [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    const int next = (host->rank() + 1) % host->size();
    const int previous = (host->rank() + host->size() - 1) % host->size();
    for (const uint64_t n : {0ul, 10ul, 100000ul, 200000ul}) {
      std::vector<std::vector<float>> out;
      std::vector<std::vector<float>> in(5, std::vector<float>(n));
      std::vector<OperationPtr> operations;
      for (int tag = 0; tag < 5; ++tag) {
        out.emplace_back(n, host->rank() * 10 + tag);
        operations.push_back(
            group->send(out[tag].data(), floats(n), next, tag, {}));
      }
      for (int tag = 4; tag >= 0; --tag) {
        operations.push_back(
            group->receive(in[tag].data(), floats(n), previous, tag, {}));
      }
      for (const auto& operation : operations) wait(operation);
      for (int tag = 0; tag < 5; ++tag) {
        for (const float v : in[tag]) {
          require(v == previous * 10 + tag, "message");
        }
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Sizes, Core, ::testing::Values(1, 2, 3, 4, 8));

TEST(CoreLarge, SixtyFourRanks) {
  run_threads(64, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    for (const uint64_t n : {3ul, 5000ul, 200000ul}) {
      std::vector<float> sum(n, host->rank());
      wait(group->all_reduce(sum.data(), floats(n), Reduction::max, {}));
      require(sum[n - 1] == 63, "max");
    }
  });
}

// Two groups, entered in opposite order by the two ranks: nothing blocks.
TEST(CoreOrder, OppositeOrderOfGroups) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    auto a = group_of(host, "a");
    auto b = group_of(host, "b");
    for (int i = 0; i < 200; ++i) {
      const uint64_t n = i % 2 == 0 ? 100 : 100000;
      std::vector<float> x(n, 1);
      std::vector<float> y(n, 2);
      auto& first = host->rank() == 0 ? a : b;
      auto& second = host->rank() == 0 ? b : a;
      auto& p = host->rank() == 0 ? x : y;
      auto& q = host->rank() == 0 ? y : x;
      auto one = first->all_reduce(p.data(), floats(n), Reduction::sum, {});
      auto two = second->all_reduce(q.data(), floats(n), Reduction::sum, {});
      wait(one);
      wait(two);
      require(x[n - 1] == 2 && y[n - 1] == 4, "sums");
    }
  });
}

TEST(CoreOrder, SeveralThreadsOfOneRankWait) {
  run_threads(3, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    std::vector<std::vector<float>> data(64, std::vector<float>(30000, 1));
    std::vector<OperationPtr> operations;
    for (auto& d : data) {
      operations.push_back(
          group->all_reduce(d.data(), floats(d.size()), Reduction::sum, {}));
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (size_t i = t; i < operations.size(); i += 3) {
          operations[operations.size() - 1 - i]->wait();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& d : data) require(d[29999] == 3, "sum");
  });
}

TEST(CoreFailure, AbortEndsEverythingAtOnce) {
  auto hub = make_hub(3);
  std::vector<std::thread> threads;
  std::vector<std::string> errors(3);
  std::atomic<int> pending{0};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto host = join_threads(hub, rank);
      auto group = group_of(host, "world");
      std::vector<float> x(100000);
      auto operation =
          group->all_reduce(x.data(), floats(x.size()), Reduction::sum, {});
      ++pending;
      errors[rank] = thrown_by<Aborted>([&] { wait(operation); }).what();
      EXPECT_THROW(wait(group->barrier({})), Aborted);
    });
  }
  while (pending < 2) std::this_thread::yield();
  hub->abort("rank 2 ended with: disk full");
  for (auto& thread : threads) thread.join();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(
        errors[rank], HasSubstr("all_reduce #0 of group world: rank 2 ended"));
  }
}

TEST(CoreFailure, DeadlineNamesMissingRanks) {
  run_threads(4, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "dp", 700ms);
    auto other = group_of(host, "other");
    std::vector<float> x(50000, 1);
    const auto reduce = [&] {
      wait(group->all_reduce(x.data(), floats(x.size()), Reduction::sum, {}));
    };
    if (host->rank() != 1 && host->rank() != 3) {
      const auto error = thrown_by<Timeout>(reduce);
      EXPECT_EQ(error.missing(), (std::vector<int>{1, 3}));
      EXPECT_EQ(error.sequence(), 0u);
      EXPECT_THAT(error.what(), HasSubstr("timed out after 0.7 s"));
    }
    wait(other->barrier({}));  // the rest of the job goes on
    if (host->rank() == 1) {
      EXPECT_THROW(reduce(), Timeout);  // too late: the group has failed
    }
    wait(other->barrier({}));
  });
}

// Rank 0 receives what rank 1 never sends; `before` it waits.
void expect_timeout_of_receive(
    const std::shared_ptr<Host>& host,
    const std::function<void(const OperationPtr&)>& before) {
  auto group = group_of(host, "pp", 300ms);
  auto other = group_of(host, "other");
  float x = 0;
  if (host->rank() == 0) {
    auto receive = group->receive(&x, floats(1), 1, 9, {});
    before(receive);
    const auto error = thrown_by<Timeout>([&] { wait(receive); });
    EXPECT_EQ(error.missing(), std::vector<int>{1});
  }
  wait(other->barrier({}));
}

TEST(CoreFailure, ReceiveTimesOut) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    expect_timeout_of_receive(host, [](const OperationPtr&) {});
  });
}

TEST(CoreFailure, AMemberThatLeftIsNamed) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    wait(group->barrier({}));
    if (host->rank() == 1) return;
    const auto error = thrown_by<PeerLost>([&] { wait(group->barrier({})); });
    EXPECT_EQ(error.missing(), std::vector<int>{1});
  });
}

TEST(CoreGroups, ComeAndGoWithoutLeaks) {
  std::vector<uint64_t> first(4);
  std::vector<uint64_t> last(4);
  auto hub = make_hub(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      auto host = join_threads(hub, rank);
      auto world = group_of(host, "world");
      auto& segment = static_cast<Attachment&>(*host).segment();
      for (int i = 0; i < 200; ++i) {
        wait(world->barrier({}));
        if (rank == 0 && (i == 0 || i == 199)) {
          const uint64_t place = segment.allocate(kPage);
          segment.release(place, kPage);
          (i == 0 ? first : last)[0] = place;
        }
        wait(world->barrier({}));
        auto half = Communicator::create(
            host, {rank / 2 * 2, rank / 2 * 2 + 1}, "half", 60s);
        auto all = group_of(host, "all");
        float x = 1;
        wait(half->all_reduce(&x, floats(1), Reduction::sum, {}));
        wait(all->all_reduce(&x, floats(1), Reduction::sum, {}));
        EXPECT_EQ(x, 8);
        wait(all->send(&x, floats(1), (rank + 1) % 4, 0, {}));
        wait(all->receive(&x, floats(1), (rank + 3) % 4, 0, {}));
        half.reset();
        all.reset();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(first, last);
}

// Seven ranks wait for an eighth on whatever cores there are.
TEST(CoreWaiting, CostsLittleTime) {
  timespec before{};
  timespec after{};
  std::atomic<int> waiting{0};
  run_threads(8, [&](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    wait(group->barrier({}));
    if (host->rank() == 0) {
      while (waiting < 7) std::this_thread::yield();
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
      std::this_thread::sleep_for(1s);  // what is measured
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    } else {
      ++waiting;
    }
    wait(group->barrier({}));
  });
  const double used =
      static_cast<double>(after.tv_sec - before.tv_sec) +
      static_cast<double>(after.tv_nsec - before.tv_nsec) * 1e-9;
  EXPECT_LT(used, 0.3);
}

const auto kPatience = 60s;  // else something is stuck

void wait_until(const std::function<bool()>& holds, const std::string& what) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    require(std::chrono::steady_clock::now() < end, what);
    std::this_thread::yield();
  }
}

TEST(CoreWaiting, CollectivesCompleteWithoutAWait) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    auto other = group_of(host, "other");
    float x = 1, y = 2;
    std::vector<OperationPtr> sums;
    for (float* value : {&x, &y}) {
      if (host->rank() == 1) wait(other->barrier({}));
      sums.push_back(group->all_reduce(value, floats(1), Reduction::sum, {}));
      if (host->rank() == 0) wait(other->barrier({}));
    }
    for (const auto& sum : sums) {
      wait_until([&] { return sum->done(); }, "never reduced");
    }
    require(x == 2 && y == 4, "sum");
    wait(group->barrier({}));
  });
}

// More of them than fit between two ranks: the sender waits for the progress
// thread of a rank that does not.
TEST(CoreWaiting, SmallReceivesCompleteWithoutAWait) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    for (int round = 0; round < 3; ++round) {
      std::vector<float> in(20), out(20, 1.0f);
      std::vector<OperationPtr> receives;
      if (host->rank() == 0) {
        for (float& x : in) {
          receives.push_back(group->receive(&x, floats(1), 1, 3, {}));
        }
      }
      wait(group->barrier({}));
      if (host->rank() == 1) {
        for (float& x : out) wait(group->send(&x, floats(1), 0, 3, {}));
      }
      for (size_t k = 0; k < receives.size(); ++k) {
        wait_until([&] { return receives[k]->done(); }, "never received");
        require(in[k] == 1, "message");
      }
      wait(group->barrier({}));
    }
  });
}

TEST(CoreWaiting, ASmallReceiveTimesOutWithoutAWait) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    expect_timeout_of_receive(host, [](const OperationPtr& receive) {
      wait_until([&] { return receive->done(); }, "no timeout");
    });
  });
}

TEST(CoreStatus, TornLinesAreNotSeen) {
  run_threads(2, [](std::shared_ptr<Host> host) {
    auto group = group_of(host, "world");
    if (host->rank() == 0) {
      for (int i = 0; i < 3000; ++i) {
        host->publish_status(std::string(i % 4000, 'a' + i % 26));
      }
      host->publish_status(std::string(9000, 'z'));
    } else {
      for (int i = 0; i < 3000; ++i) {
        const std::string line = host->read_status(0);
        require(
            line.empty() || line == std::string(line.size(), line[0]), line);
      }
    }
    wait(group->barrier({}));
    require(
        host->read_status(0) == std::string(4080, 'z'), "truncated to a page");
    require(host->read_status(1).empty(), "nothing published");
  });
}

TEST(CoreArguments, AreCheckedOnThisRankAlone) {
  auto hub = make_hub(2);
  auto host = join_threads(hub, 0);
  EXPECT_THROW(join_threads(hub, 0), ConfigError);
  EXPECT_THROW(join_threads(hub, 2), ConfigError);
  EXPECT_THROW(make_hub(0), ConfigError);
  EXPECT_THROW(Communicator::create(host, {1}, "g", 1s), ConfigError);
  EXPECT_THROW(Communicator::create(host, {0, 0}, "g", 1s), ConfigError);
  EXPECT_THROW(Communicator::create(host, {0, 2}, "g", 1s), ConfigError);
  EXPECT_THROW(host->read_status(2), ConfigError);
}

}  // namespace echelon::local::core_test
