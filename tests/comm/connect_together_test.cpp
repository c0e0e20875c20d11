// A group whose members cannot connect at once.

#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "echelon/comm/gloo/gloo_backend.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::connect_together_test {

using testing::HasSubstr;

constexpr int kSize = 3;
constexpr auto kTimeout = std::chrono::seconds(30);

// Each member in a thread of its own, all with one store.
void on_members(
    const std::function<void(int, c10::intrusive_ptr<c10d::Store>)>& body) {
  avoid_flight_recorder();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> members;
  for (int rank = 0; rank < kSize; ++rank) {
    members.emplace_back([&, rank] { body(rank, store); });
  }
  for (auto& member : members) member.join();
}

TEST(ConnectTogether, AMemberThatFailsOnceMakesAllConnectAgain) {
  std::atomic<int> attempts = 0;
  testing::internal::CaptureStderr();
  on_members([&](int rank, const auto& store) {
    int mine = 0;
    const auto backend = connect_together(
        store, {"tp", rank, kSize}, kTimeout, [&](const auto& attempt) {
          ++attempts;
          if (++mine == 1 && rank == 1) {
            // The others are left alone with a member that never comes.
            throw std::runtime_error("connection closed by peer\nat line 3");
          }
          return make_gloo_backend(
              attempt, rank, kSize, "127.0.0.1",
              mine == 1 ? std::chrono::seconds(1) : kTimeout);
        });
    std::vector<at::Tensor> sum = {torch::full({4}, rank + 1.0)};
    backend->allreduce(sum)->wait();
    EXPECT_EQ(sum[0].sum().item<double>(), 4 * 6.0);
  });
  EXPECT_EQ(attempts, 2 * kSize);
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("warning: group \"tp\": connecting failed, trying again ("));
}

TEST(ConnectTogether, TheLastFailureIsThrownByAll) {
  std::atomic<int> attempts = 0;
  testing::internal::CaptureStderr();
  on_members([&](int rank, const auto& store) {
    const auto connect = [&](const auto&) -> c10::intrusive_ptr<c10d::Backend> {
      ++attempts;
      if (rank == 2) throw CommError("no route to host");
      return nullptr;
    };
    const auto text = error_text<CommError>([&] {
      connect_together(store, {"dp", rank, kSize}, kTimeout, connect);
    });
    EXPECT_THAT(text, HasSubstr("no route to host"));
  });
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(attempts, 3 * kSize);
}

TEST(ConnectTogether, AMemberWhoseTimeIsUpDoesNotWaitForTheOthers) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto text = error_text<CommError>([&] {
    connect_together(
        store, {"dp", 0, kSize}, std::chrono::milliseconds(0),
        [](const auto&) -> c10::intrusive_ptr<c10d::Backend> {
          throw CommError("rank 1 did not come");
        });
  });
  EXPECT_EQ(text, "rank 1 did not come");
}

}  // namespace echelon::connect_together_test
