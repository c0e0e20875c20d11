// The local backend between threads of one process.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <numeric>

#include "echelon/comm/local/local.h"
#include "tests/comm/local/cases.h"
#include "tests/comm/shared_memory/thread_ranks.h"

namespace echelon::local::threads_test {

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

class Threads
    : public ::testing::TestWithParam<std::tuple<int, testing::Case>> {};

TEST_P(Threads, Pass) {
  const auto& [size, test] = GetParam();
  run(size,
      [&test = test](std::shared_ptr<Host> host) { test.run(*world(host)); });
}
INSTANTIATE_TEST_SUITE_P(
    Sizes, Threads,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 4, 8),
        ::testing::ValuesIn(testing::cases())),
    [](const auto& info) {
      return std::get<1>(info.param).name +
             std::to_string(std::get<0>(info.param));
    });

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
    EXPECT_THROW(future->waitAndThrow(), Mismatch);
    require(!work->isSuccess() && work->exception(), "not Mismatch");
    group->barrier()->wait();  // still usable
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
  });
}

TEST(ThreadsGroup, DtypesAndReductionsThatItDoesNotHaveAreRefused) {
  run(2, [](std::shared_ptr<Host> host) {
    auto group = world(host);
    Tensors complex = {at::ones({2}, at::kComplexFloat)};
    Tensors boolean = {at::ones({2}, at::kBool)};
    Tensors one = {at::ones({2})};
    c10d::AllreduceOptions average;
    average.reduceOp = c10d::ReduceOp::AVG;
    c10d::AllreduceOptions product;
    product.reduceOp = c10d::ReduceOp::PRODUCT;
    EXPECT_THROW(group->allreduce(complex), ConfigError);
    EXPECT_THROW(group->allreduce(boolean, average), ConfigError);
    EXPECT_THROW(group->allreduce(one, product), ConfigError);
    group->allreduce(one)->wait();
    require(one[0][0].item<float>() == 2, "sum");
  });
}

}  // namespace echelon::local::threads_test
