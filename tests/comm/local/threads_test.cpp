// The local backend between threads of one process.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <future>
#include <numeric>

#include "echelon/comm/local/local.h"
#include "tests/comm/local/cases.h"
#include "tests/comm/shared_memory/thread_ranks.h"

namespace echelon::local {
namespace threads_test {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using testing::require;

void run(int size, const std::function<void(std::shared_ptr<Host>)>& body) {
  testing::run_threads(size, [&](std::shared_ptr<Host> host) {
    at::set_num_threads(1);
    body(std::move(host));
  });
}

BackendPtr world(const std::shared_ptr<Host>& host) {
  std::vector<int> ranks(host->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return make_backend(host, ranks, "world", 60s);
}

class Threads : public ::testing::TestWithParam<int> {
 protected:
  void each(const std::function<void(c10d::Backend&)>& body) {
    run(GetParam(), [&](std::shared_ptr<Host> host) { body(*world(host)); });
  }
};

TEST_P(Threads, Reductions) {
  each(testing::reductions);
}
TEST_P(Threads, Movements) {
  each(testing::movements);
}
TEST_P(Threads, Lists) {
  each(testing::lists);
}
TEST_P(Threads, Messages) {
  each(testing::messages);
}
TEST_P(Threads, ManyInFlight) {
  each(testing::many_in_flight);
}
TEST_P(Threads, Mismatches) {
  if (GetParam() > 1) {
    each(testing::mismatches);
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, Threads, ::testing::Values(1, 2, 3, 4, 8));

TEST(ThreadsGroup, Splits) {
  run(4, [](std::shared_ptr<Host> host) {
    auto whole = world(host);
    const int first = host->rank() % 2;
    auto part = whole->split(nullptr, {first, first + 2}, nullptr);
    require(
        part->getSize() == 2 && part->getRank() == host->rank() / 2, "rank");
    Tensors t = {at::full({5}, static_cast<float>(host->rank()))};
    part->allreduce(t)->wait();
    require(t[0][4].item<float>() == 2 * first + 2, "sum");
    require(part->getSequenceNumberForGroup() == 1, "sequence");
    require(whole->getSequenceNumberForGroup() == 0, "sequence of the whole");
    require(whole->getBackendOptions()->timeout == 60s, "timeout");
    whole->barrier()->wait();
  });
}

TEST(ThreadsGroup, ACallbackMustNotWait) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = world(host);
    Tensors big = {at::ones({1 << 20})};
    Tensors next = {at::ones({4})};
    auto later = group->recv(next, 1 - host->rank(), 0);
    auto work = group->allreduce(big);
    std::string message;
    auto done = work->getFuture()->then(
        [&](c10::ivalue::Future&) -> c10::IValue {
          try {
            later->wait();
          } catch (const CommError& error) {
            message = error.what();
          }
          return c10::IValue(1);
        },
        c10::IntType::get());
    done->wait();
    // On the progress thread it would wait for itself; on this one it may wait.
    Tensors mine = {at::ones({4})};
    group->send(mine, 1 - host->rank(), 0)->wait();
    later->wait();
    require(
        message.empty() ||
            message.find("would wait for itself") != std::string::npos,
        message);
  });
}

TEST(ThreadsGroup, AnErrorReachesTheFuture) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = world(host);
    Tensors t = {at::ones({host->rank() + 1})};
    auto work = group->allreduce(t);
    auto future = work->getFuture();
    future->wait();
    require(future->hasError(), "no error");
    EXPECT_THROW(work->wait(), Mismatch);  // the work ends after its future
    bool thrown = false;
    try {
      future->waitAndThrow();
    } catch (const Mismatch&) {
      thrown = true;
    }
    require(thrown && !work->isSuccess() && work->exception(), "not Mismatch");
    require(group->getError() == c10d::ErrorType::SUCCESS, "still usable");
    group->barrier()->wait();
  });
}

TEST(ThreadsGroup, AnErrorOfTheCopyIntoTheResultsReachesTheCaller) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = world(host);
    auto other = make_backend(host, {0, 1}, "other", 60s);
    Tensors t = {at::ones({2}), at::ones({3})};
    if (host->rank() == 0) {
      auto work = group->allreduce_coalesced(t);
      t[1].resize_({4});
      other->barrier()->wait();
      EXPECT_THROW(work->wait(), c10::Error);
      require(work->isCompleted() && !work->isSuccess(), "success");
      require(work->exception() != nullptr, "no exception");
    } else {
      other->barrier()->wait();
      group->allreduce_coalesced(t)->wait();
    }
    group->barrier()->wait();
  });
}

TEST(ThreadsGroup, AbortAndShutdownEndPendingOperations) {
  run(2, [](std::shared_ptr<Host> host) {
    for (const bool abort : {true, false}) {
      auto group = make_backend(host, {0, 1}, "g", 60s);
      auto other = world(host);
      Tensors t = {at::ones({4})};
      c10::intrusive_ptr<c10d::Work> pending;
      if (host->rank() == 0) {
        pending = group->recv(t, 1, 3);
      }
      other->barrier()->wait();
      if (host->rank() == 0) {
        abort ? group->abort() : group->shutdown();
        bool thrown = false;
        try {
          pending->wait();
        } catch (const Aborted&) {
          thrown = true;
        }
        require(thrown, "pending");
        require(group->getError() == c10d::ErrorType::COMM_ERROR, "getError");
      } else {
        group->shutdown();  // nothing pending: nothing happens
      }
      other->barrier()->wait();
    }
  });
}

TEST(ThreadsGroup, ShutdownCompletesOperationsThatHaveArrived) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = make_backend(host, {0, 1}, "g", 60s);
    auto other = world(host);
    Tensors t = {at::full({4}, static_cast<float>(host->rank()))};
    c10::intrusive_ptr<c10d::Work> received;
    if (host->rank() == 0) {
      received = group->recv(t, 1, 3);
    }
    other->barrier()->wait();
    if (host->rank() == 1) {
      group->send(t, 0, 3)->wait();
    }
    other->barrier()->wait();
    group->shutdown();
    require(group->getError() == c10d::ErrorType::SUCCESS, "getError");
    if (host->rank() == 0) {
      require(received->isCompleted() && received->isSuccess(), "received");
      require(t[0][3].item<float>() == 1, "message");
    }
    other->barrier()->wait();
  });
}

TEST(ThreadsGroup, ShutdownDoesNotWaitForCallbacks) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = make_backend(host, {0, 1}, "g", 60s);
    auto other = world(host);
    Tensors t = {at::full({4}, static_cast<float>(host->rank()))};
    if (host->rank() == 1) {
      other->barrier()->wait();
      group->send(t, 0, 3)->wait();
      other->barrier()->wait();
      return;
    }
    auto received = group->recv(t, 1, 3);
    std::promise<void> begun, asked, told;
    received->getFuture()->addCallback([&](auto&) {
      begun.set_value();
      asked.get_future().wait();
      told.set_value();
    });
    other->barrier()->wait();
    other->barrier()->wait();
    begun.get_future().wait();
    group->shutdown();
    const bool over = received->isCompleted() && received->isSuccess();
    asked.set_value();
    told.get_future().wait();
    require(over, "received");
    require(t[0][3].item<float>() == 1, "message");
  });
}

TEST(ThreadsGroup, AWaitWithALimitLeavesTheOperation) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = world(host);
    auto other = make_backend(host, {0, 1}, "other", 60s);
    if (host->rank() == 0) {
      auto work = group->barrier();
      EXPECT_THROW(work->wait(20ms), Timeout);
      other->barrier()->wait();
      work->wait();
    } else {
      other->barrier()->wait();
      group->barrier()->wait();
    }
    group->setTimeout(200ms);
    if (host->rank() == 0) {
      EXPECT_THROW(group->monitoredBarrier({}), Timeout);
    }
    other->barrier()->wait();
  });
}

TEST(ThreadsGroup, WrongArgumentsSendNothing) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = world(host);
    Tensors two = {at::ones({2}), at::ones({2})};
    Tensors complex = {at::ones({2}, at::kComplexFloat)};
    Tensors boolean = {at::ones({2}, at::kBool)};
    Tensors one = {at::ones({2})};
    auto three = at::empty({3});
    c10d::AllreduceOptions average;
    average.reduceOp = c10d::ReduceOp::AVG;
    c10d::AllreduceOptions product;
    product.reduceOp = c10d::ReduceOp::PRODUCT;
    c10d::BroadcastOptions root;
    root.rootRank = 2;
    std::vector<int64_t> splits = {1, 2};
    std::vector<int64_t> none;
    EXPECT_THROW(group->allreduce(two), ConfigError);
    EXPECT_THROW(group->allreduce(complex), ConfigError);
    EXPECT_THROW(group->allreduce(boolean, average), ConfigError);
    EXPECT_THROW(group->allreduce(one, product), ConfigError);
    EXPECT_THROW(group->broadcast(one, root), ConfigError);
    EXPECT_THROW(group->_allgather_base(three, one[0]), ConfigError);
    EXPECT_THROW(group->_reduce_scatter_base(one[0], three), ConfigError);
    EXPECT_THROW(group->alltoall_base(three, three, none, none), ConfigError);
    EXPECT_THROW(
        group->alltoall_base(three, one[0], none, splits), ConfigError);
    EXPECT_THROW(group->send(one, 2, 0), ConfigError);
    EXPECT_THROW(group->recv(one, -1, 0), ConfigError);
    group->allreduce(one)->wait();
    require(one[0][0].item<float>() == 2, "sum");
  });
}

}  // namespace threads_test
}  // namespace echelon::local
