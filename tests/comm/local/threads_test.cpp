// The local backend between threads of one process.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <thread>

#include "echelon/comm/local/local.h"
#include "tests/comm/local/cases.h"

namespace echelon::local {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Runs `body` on one thread per rank; the first error ends the others and fails
// the test.
void run(int size, const std::function<void(std::shared_ptr<Host>)>& body) {
  auto hub = make_hub(size);
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        body(join_threads(hub, rank));
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        hub->abort("rank " + std::to_string(rank) + " failed");
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(errors[rank], "") << "rank " << rank;
  }
}

std::vector<int> all_ranks(const Host& host) {
  std::vector<int> ranks(host.size());
  for (int r = 0; r < host.size(); ++r) {
    ranks[r] = r;
  }
  return ranks;
}

BackendPtr world(const std::shared_ptr<Host>& host) {
  return make_backend(host, all_ranks(*host), "world", 60s);
}

class Threads : public ::testing::TestWithParam<int> {
 protected:
  void each(const std::function<void(c10d::Backend&)>& body) {
    run(GetParam(), [&](std::shared_ptr<Host> host) { body(*world(host)); });
  }
};

TEST_P(Threads, Reductions) { each(testing::reductions); }
TEST_P(Threads, Movements) { each(testing::movements); }
TEST_P(Threads, Lists) { each(testing::lists); }
TEST_P(Threads, Messages) { each(testing::messages); }
TEST_P(Threads, ManyInFlight) { each(testing::many_in_flight); }
TEST_P(Threads, Mismatches) {
  if (GetParam() > 1) {
    each(testing::mismatches);
  }
}
INSTANTIATE_TEST_SUITE_P(Sizes, Threads, ::testing::Values(1, 2, 3, 4, 8));

}  // namespace
}  // namespace echelon::local
