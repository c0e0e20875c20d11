#include "echelon/bench/bench_meter.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "echelon/bench/bench_fits.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRounds = 9;
constexpr double kRoundSeconds = 0.002;
constexpr double kTurnSeconds = 0.001;
// A call that takes as long is measured fewer times.
constexpr double kLongSeconds = 0.05;
constexpr int64_t kLongRounds = 2;
constexpr size_t kTurns = 15;
// Between two looks at whether cores are slow, and how many there are.
constexpr std::chrono::milliseconds kPause(20);
constexpr int64_t kPatience = 1500;
constexpr int64_t kMostRepeated = 100;
constexpr int kProducts = 20;
// Calls that take turns take less than this, or more.
constexpr std::array<double, 3> kGroupSeconds = {8e-6, 200e-6, 3e-3};

std::vector<int> ranks_of(const World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Seconds of some products: the quickest of three times, which an interrupt
// leaves alone and a core that is shared does not.
double seconds_of_products() {
  const torch::NoGradGuard no_grad;
  const torch::Tensor a = torch::ones({64, 64});
  double quickest = 1;
  for (int time = 0; time < 3; ++time) {
    const auto begin = Clock::now();
    for (int i = 0; i < kProducts; ++i) a.mm(a);
    quickest = std::min(quickest, seconds_since(begin));
  }
  return quickest;
}

}  // namespace

BenchMeter::BenchMeter(World& world) : BenchMeter(world, seconds_of_products) {}

BenchMeter::BenchMeter(World& world, std::function<double()> pace)
    : world_(world),
      all_(world.new_group("bench", ranks_of(world), BackendKind::automatic)),
      pace_(std::move(pace)),
      usual_(kPatience) {
  if (!on_gpu()) slow();  // learns
}

double BenchMeter::seconds_of(const std::function<void()>& call) {
  call();
  const double once = average(round(call, 1));
  const int64_t calls = calls_in(kRoundSeconds, once);
  const int64_t rounds = agreed(once > kLongSeconds ? kLongRounds : kRounds);
  std::vector<double> times;
  for (int64_t i = 0; i < rounds; ++i) {
    times.push_back(
        undisturbed([&] { return std::vector{round(call, calls)}; })[0]);
  }
  return average(median(std::move(times)));
}

std::vector<std::vector<double>> BenchMeter::rounds_of_own_seconds(
    const std::vector<std::function<double()>>& calls, int64_t again,
    int64_t rounds) {
  std::vector<std::vector<double>> seconds;
  for (int64_t round = 0; round < rounds; ++round) {
    seconds.push_back(undisturbed([&] {
      std::vector<double> row;
      for (const auto& call : calls) {
        all_.barrier();
        call();  // what wakes from a barrier is slow at first
        std::vector<double> times;
        for (int64_t i = 0; i < again; ++i) times.push_back(call());
        row.push_back(average(median(std::move(times))));
      }
      return row;
    }));
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
  // A network's operators are about as large as each other: what a large one
  // leaves in the caches is nothing that a small one would find.
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
  const auto take_turns = [&](const std::vector<size_t>& group,
                              const auto& turn) {
    for (size_t taken = 0; taken < kTurns && !group.empty(); ++taken) {
      const auto row = undisturbed(turn);
      for (size_t k = 0; k < group.size(); ++k)
        times[group[k]].push_back(row[k]);
    }
  };
  take_turns(alike.front(), [&] {
    std::vector<double> row;
    for (size_t k = 0; k < alike.front().size(); ++k) {
      row.push_back(round(calls[alike.front()[k]], again[k]));
    }
    return row;
  });
  for (size_t g = 1; g < alike.size(); ++g) {
    take_turns(alike[g], [&] {
      all_.barrier();
      calls[alike[g].back()]();  // what wakes from a barrier is slow at first
      std::vector<double> row;
      for (const size_t i : alike[g]) {
        const auto begin = Clock::now();
        calls[i]();
        row.push_back(seconds_since(begin));
      }
      return row;
    });
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    seconds[i] = average(median(std::move(times[i])));
  }
  return seconds;
}

std::vector<double>
BenchMeter::undisturbed(const std::function<std::vector<double>()>& round) {
  auto seconds = round();
  while (!on_gpu() && repeated_ < kMostRepeated && slow()) {
    do {
      std::this_thread::sleep_for(kPause);
    } while (slow());
    seconds = round();
    ++repeated_;
  }
  return seconds;
}

// The same on every rank.
bool BenchMeter::slow() {
  all_.barrier();
  return usual_.slow(most(pace_()));
}

// What is called for the first time is slow.
double BenchMeter::quickest_seconds_of(const std::function<void()>& call) {
  call();
  double quickest = round(call, 2);
  for (int again = 0; again < 4; ++again) {
    quickest = std::min(quickest, round(call, 2));
  }
  return average(quickest);
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
  return seconds_since(begin) / static_cast<double>(calls);
}

double BenchMeter::average(double value) const {
  const auto sum =
      torch::full({1}, value, torch::dtype(torch::kFloat64)).to(device());
  all_.all_reduce(sum);
  return sum.item<double>() / world_.size();
}

double BenchMeter::most(double value) const {
  const auto one =
      torch::full({1}, value, torch::dtype(torch::kFloat64)).to(device());
  all_.all_reduce(one, ReduceOp::max);
  return one.item<double>();
}

// That take about so long; each `once`.
int64_t BenchMeter::calls_in(double seconds, double once) const {
  return agreed(std::clamp<int64_t>(
      static_cast<int64_t>(seconds / std::max(once, 1e-7)), 1, 20000));
}

// As many on every rank, so that none computes alone at the end.
int64_t BenchMeter::agreed(int64_t calls) const {
  return std::max<int64_t>(
      1, static_cast<int64_t>(average(static_cast<double>(calls))));
}

}  // namespace echelon
