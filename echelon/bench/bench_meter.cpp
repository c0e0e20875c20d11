// A round begins with a barrier of all ranks and ends when the device has
// finished. The number of calls in a round is agreed among the ranks, so that
// none measures while another is idle. On a processor calls of similar length
// take turns; the shortest are repeated within their turn.
#include "echelon/bench/bench_meter.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <vector>

namespace echelon::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRounds = 9;
constexpr double kRoundSeconds = 0.002;
constexpr double kTurnSeconds = 0.001;
// A call of this length or more is measured fewer times.
constexpr double kLongSeconds = 0.05;
constexpr int64_t kLongRounds = 2;
constexpr size_t kTurns = 15;
constexpr size_t kLongTurns = 3;
// Bounds between the groups of calls that take turns.
constexpr std::array<double, 3> kGroupSeconds = {8e-6, 200e-6, 3e-3};

std::vector<int> ranks_of(const World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[(values.size() - 1) / 2];
}

BenchMeter::BenchMeter(World& world)
    : world_(world),
      all_(world.new_group("bench", ranks_of(world), BackendKind::automatic)) {}

double BenchMeter::seconds_of(const std::function<void()>& call) {
  call();
  const double once = average(round(call, 1));
  const int64_t calls = calls_in(kRoundSeconds, once);
  const int64_t rounds = agreed(once > kLongSeconds ? kLongRounds : kRounds);
  std::vector<double> times;
  for (int64_t i = 0; i < rounds; ++i) {
    times.push_back(round(call, calls));
  }
  return average(median(std::move(times)));
}

std::vector<std::vector<double>> BenchMeter::rounds_of_own_seconds(
    const std::vector<std::function<double()>>& calls, int64_t again,
    int64_t rounds) {
  std::vector<std::vector<double>> seconds;
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<double> row;
    for (const auto& call : calls) {
      all_.barrier();
      call();  // the first call after a barrier is slow
      std::vector<double> times;
      for (int64_t i = 0; i < again; ++i) times.push_back(call());
      row.push_back(average(median(std::move(times))));
    }
    seconds.push_back(std::move(row));
  }
  return seconds;
}

std::vector<double>
BenchMeter::seconds_of(const std::vector<std::function<void()>>& calls) {
  std::vector<double> seconds;
  if (on_gpu()) {
    for (const auto& call : calls) seconds.push_back(seconds_of(call));
    return seconds;
  }
  // A network's operators are of similar size, so only calls of similar length
  // take turns: a small operator never runs on what a large one left in the
  // caches.
  std::array<std::vector<size_t>, kGroupSeconds.size() + 1> alike;
  for (const auto& call : calls) {
    seconds.push_back(quickest_seconds_of(call));
    size_t group = 0;
    while (group < kGroupSeconds.size() &&
           seconds.back() > kGroupSeconds[group]) {
      ++group;
    }
    alike[group].push_back(seconds.size() - 1);
  }
  std::vector<int64_t> again;
  for (const size_t i : alike.front()) {
    again.push_back(calls_in(kTurnSeconds, seconds[i]));
  }
  std::vector<std::vector<double>> times(calls.size());
  for (size_t taken = 0; taken < kTurns; ++taken) {
    for (size_t k = 0; k < alike.front().size(); ++k) {
      const size_t i = alike.front()[k];
      times[i].push_back(round(calls[i], again[k]));
    }
  }
  for (size_t g = 1; g < alike.size(); ++g) {
    for (size_t taken = 0; taken < kTurns && !alike[g].empty(); ++taken) {
      all_.barrier();
      calls[alike[g].back()]();  // the first call after a barrier is slow
      for (const size_t i : alike[g]) {
        if (seconds[i] > kLongSeconds && taken >= kLongTurns) continue;
        const auto begin = Clock::now();
        calls[i]();
        times[i].push_back(seconds_since(begin));
      }
    }
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    seconds[i] = average(median(std::move(times[i])));
  }
  return seconds;
}

// A long call is timed once. Otherwise the first call, which is slow, is left
// out.
double BenchMeter::quickest_seconds_of(const std::function<void()>& call) {
  if (const double once = average(round(call, 1)); once > kLongSeconds) {
    return once;
  }
  double quickest = round(call, 2);
  for (int again = 0; again < 4; ++again) {
    quickest = std::min(quickest, round(call, 2));
  }
  return average(quickest);
}

void BenchMeter::finish() const {
  // Reading a value waits for everything launched before.
  if (on_gpu()) torch::zeros({1}, device()).item<float>();
}

double BenchMeter::round(const std::function<void()>& call, int64_t calls) {
  all_.barrier();
  finish();
  const auto begin = Clock::now();
  for (int64_t i = 0; i < calls; ++i) call();
  finish();
  return seconds_since(begin) / static_cast<double>(calls);
}

double BenchMeter::average(double value) const {
  const auto sum =
      torch::full({1}, value, torch::dtype(torch::kFloat64)).to(device());
  all_.all_reduce(sum);
  return sum.item<double>() / world_.size();
}

// How many calls of `once` seconds take about `seconds`.
int64_t BenchMeter::calls_in(double seconds, double once) const {
  return agreed(std::clamp<int64_t>(
      static_cast<int64_t>(seconds / std::max(once, 1e-7)), 1, 20000));
}

// The same number on every rank, so that none computes alone at the end.
int64_t BenchMeter::agreed(int64_t calls) const {
  return std::max<int64_t>(
      1, static_cast<int64_t>(average(static_cast<double>(calls))));
}

}  // namespace echelon::bench
