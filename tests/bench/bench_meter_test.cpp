#include "echelon/bench/bench_meter.h"

#include <gmock/gmock.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "echelon/comm/world.h"
#include "tests/support/ranks.h"

namespace echelon::bench::bench_meter_test {

using testing::ElementsAre;

const Ranks kTwo{.size = 2};

TEST(BenchMeter, RoundsOfOwnSecondsSkipTheFirstCall) {
  kTwo.run([](World& world) {
    BenchMeter meter(world);
    double calls = 0;
    EXPECT_THAT(
        meter.rounds_of_own_seconds({[&] { return ++calls; }}, 1, 3),
        ElementsAre(ElementsAre(2), ElementsAre(4), ElementsAre(6)));
  });
}

TEST(BenchMeter, CallsTakeTurns) {
  kTwo.run([](World& world) {
    int64_t calls = 0;
    BenchMeter meter(world);
    const std::vector<std::function<void()>> all = {
        [&] { ++calls; },
        [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }};
    const auto seconds = meter.seconds_of(all);
    ASSERT_EQ(seconds.size(), 2u);
    EXPECT_LT(seconds[0], seconds[1]);
    EXPECT_GE(seconds[1], 1e-3);
    EXPECT_GT(calls, 15);
  });
}

TEST(BenchMeter, MedianOfTwoIsTheLower) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({4, 2}), 2);
  EXPECT_EQ(median({9, 1, 5}), 5);
}

}  // namespace echelon::bench::bench_meter_test
