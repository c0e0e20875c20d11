#include "echelon/bench/bench_jitter.h"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "echelon/bench/bench_fits.h"
#include "echelon/bench/bench_passes.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kJitterSteps = 20;
constexpr int64_t kJitterRounds = 25;

std::function<double()> timed(std::function<void()> call) {
  return [call = std::move(call)] {
    const auto begin = Clock::now();
    call();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
}

}  // namespace

double bench_jitter(BenchMeter& meter, World& world) {
  if (world.size() == 1) return 0;
  const std::vector<std::function<void()>> passes = {
      convolutions_pass(32), products_pass(32)};
  const torch::Tensor number = torch::zeros({1});
  const auto meet = [&] { world.group().all_reduce(number).wait(); };
  std::vector<std::function<double()>> calls = {timed(meet)};
  for (const auto& pass : passes) {
    calls.push_back(timed(pass));
    calls.push_back(timed([pass, meet] {
      pass();
      meet();
    }));
  }
  const auto rounds =
      meter.rounds_of_own_seconds(calls, kJitterSteps, kJitterRounds);
  double most = 0;
  for (size_t pass = 0; pass < passes.size(); ++pass) {
    std::vector<double> alone, waiting;
    for (const auto& seconds : rounds) {
      alone.push_back(seconds[1 + 2 * pass]);
      waiting.push_back(seconds[2 + 2 * pass] - alone.back() - seconds[0]);
    }
    most = std::max(
        most, fit_jitter(world.size(), median(alone), median(waiting)));
  }
  return most;
}

}  // namespace echelon
