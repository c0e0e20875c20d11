#include "echelon/train/bench_meter.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRounds = 5;
constexpr double kRoundSeconds = 0.005;
// A call that takes as long is measured fewer times.
constexpr double kLongSeconds = 0.05;
constexpr int64_t kLongRounds = 2;

std::vector<int> ranks_of(const World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

BenchMeter::BenchMeter(World& world)
    : world_(world),
      all_(world.new_group("bench", ranks_of(world), BackendKind::automatic)) {}

double BenchMeter::seconds_of(const std::function<void()>& call) {
  call();
  const double once = average(round(call, 1));
  const auto calls = agreed(std::clamp<int64_t>(
      static_cast<int64_t>(kRoundSeconds / std::max(once, 1e-7)), 1, 20000));
  const int64_t rounds = agreed(once > kLongSeconds ? kLongRounds : kRounds);
  std::vector<double> times;
  for (int64_t i = 0; i < rounds; ++i) times.push_back(round(call, calls));
  std::sort(times.begin(), times.end());
  return average(times[(times.size() - 1) / 2]);
}

void BenchMeter::finish() const {
  // A value that is read waits for all that was launched.
  if (on_gpu()) torch::zeros({1}, device()).item<float>();
}

double BenchMeter::round(const std::function<void()>& call, int64_t calls) {
  all_.barrier();
  finish();
  const auto begin = Clock::now();
  for (int64_t i = 0; i < calls; ++i) call();
  finish();
  return std::chrono::duration<double>(Clock::now() - begin).count() /
         static_cast<double>(calls);
}

double BenchMeter::average(double value) const {
  const auto sum = torch::full({1}, value, torch::dtype(torch::kFloat64))
                       .to(device());
  all_.all_reduce(sum);
  return sum.item<double>() / world_.size();
}

// As many on every rank, so that none computes alone at the end.
int64_t BenchMeter::agreed(int64_t calls) const {
  return std::max<int64_t>(
      1, static_cast<int64_t>(average(static_cast<double>(calls))));
}

}  // namespace echelon
