// Measuring while others slow the cores down.
#include "echelon/bench/bench_meter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "echelon/bench/bench_host_work.h"
#include "echelon/comm/world.h"
#include "tests/support/ranks.h"

namespace echelon {
namespace bench_meter_test {

using testing::ElementsAre;

const Ranks kTwo{.size = 2};

TEST(BenchMeter, RoundsOfSlowCoresAreMeasuredAgain) {
  kTwo.run([](World& world) {
    // One before all rounds, one after each, and more while cores are slow;
    // those of rank 1 alone are, and an interrupt is not.
    const std::vector<double> paces = {1, 1.1, 2, 1.9, 1, 1, 1.2, 1.3, 1, 1};
    size_t looks = 0;
    BenchMeter meter(world, [&] {
      const size_t at = std::min(looks++, paces.size() - 1);
      return world.rank() == 1 ? paces[at] : 1;
    });
    double calls = 0;
    const auto rounds =
        meter.rounds_of_own_seconds({[&] { return ++calls; }}, 1, 4);
    // Each round calls once before it counts. The third look is after the
    // second round, the eighth after the fourth.
    EXPECT_THAT(
        rounds,
        ElementsAre(
            ElementsAre(2), ElementsAre(6), ElementsAre(8), ElementsAre(12)));
    EXPECT_EQ(meter.repeated(), 2);
    EXPECT_EQ(looks, paces.size());
  });
}

TEST(BenchMeter, CallsThatTakeTurnsAreMeasuredAgain) {
  kTwo.run([](World& world) {
    int64_t looks = 0, calls = 0;
    BenchMeter meter(world, [&] { return ++looks == 4 ? 2.0 : 1.0; });
    const std::vector<std::function<void()>> all = {
        [&] { ++calls; },
        [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }};
    const auto seconds = meter.seconds_of(all);
    EXPECT_EQ(meter.repeated(), 1);
    ASSERT_EQ(seconds.size(), 2u);
    EXPECT_GE(seconds[1], 1e-3);
    EXPECT_GT(calls, 15);
  });
}

// Beside what takes no time all of a step is the host's work; but what is spent
// elsewhere.
TEST(BenchHostWork, IsWhatAStepTakesBesideItsOperators) {
  kTwo.run([](World& world) {
    BenchMeter meter(world, [] { return 1.0; });
    MachineMeasurement measured;
    measured.ranks = 2;
    measured.launch_seconds = 1e-12;
    measured.launch_rates = {{0, 1e-12, 1e-12, 1e-12, 1e-12}};
    measured.memory_bytes_per_second = 1e18;
    for (const int64_t side : {16, 1024}) {
      measured.matrix_rates.push_back(
          {Precision::fp32, side, side, side, 1e18});
    }
    measured.operator_rates = {{"add", 1024, 1e18}};
    measured.calls = {
        {"all_reduce", 4096, 1e-9}, {"all_reduce", 1 << 20, 2e-9}};
    const auto works = bench_host_work(meter, world, measured);
    ASSERT_EQ(works.size(), 3u);
    for (const HostWork& work : works) {
      EXPECT_GE(work.computing_seconds, works[0].computing_seconds);
      EXPECT_GT(work.step_seconds + work.pass_seconds + work.layer_seconds, 0);
    }
    EXPECT_GT(works[0].computing_seconds, 0);
    EXPECT_GT(works[0].action_seconds, 0);
    // There is nothing between yet behind which they would be slower.
    EXPECT_EQ(works[0].operator_seconds, 0);
  });
}

}  // namespace bench_meter_test
}  // namespace echelon
