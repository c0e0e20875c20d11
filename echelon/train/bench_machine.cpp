#include "echelon/train/bench_machine.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "echelon/train/bench_collectives.h"

namespace echelon {
namespace {

using torch::Tensor;
using Clock = std::chrono::steady_clock;

// Products of a processor take milliseconds, of a GPU too, at these sizes.
const std::vector<int64_t> kProcessorRows = {64, 512, 2048};
const std::vector<int64_t> kProcessorSides = {64, 256, 1024};
const std::vector<int64_t> kGpuRows = {512, 2048, 8192};
const std::vector<int64_t> kGpuSides = {512, 2048, 8192};

constexpr int kRounds = 5;
constexpr double kRoundSeconds = 0.01;

class Meter {
 public:
  explicit Meter(World& world)
      : world_(world),
        all_(world.new_group("bench", ranks_of(world), BackendKind::automatic)) {}

  /// Seconds of one call: the median over rounds that all ranks begin together,
  /// averaged over the ranks.
  double seconds_of(const std::function<void()>& call) {
    call();
    const double once = round(call, 1);
    const auto calls = std::clamp<int64_t>(
        static_cast<int64_t>(kRoundSeconds / std::max(once, 1e-7)), 1, 20000);
    std::vector<double> times;
    for (int i = 0; i < kRounds; ++i) times.push_back(round(call, agreed(calls)));
    std::sort(times.begin(), times.end());
    return average(times[times.size() / 2]);
  }

  torch::Device device() const { return world_.device(); }
  bool on_gpu() const { return device().is_cuda(); }

 private:
  static std::vector<int> ranks_of(const World& world) {
    std::vector<int> ranks;
    for (int rank = 0; rank < world.size(); ++rank) ranks.push_back(rank);
    return ranks;
  }

  void finish() const {
    // A value that is read waits for all that was launched.
    if (on_gpu()) torch::zeros({1}, device()).item<float>();
  }

  double round(const std::function<void()>& call, int64_t calls) {
    all_.barrier();
    finish();
    const auto begin = Clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    finish();
    return std::chrono::duration<double>(Clock::now() - begin).count() /
           static_cast<double>(calls);
  }

  double average(double value) const {
    const Tensor sum = torch::full({1}, value, device()).to(torch::kFloat64);
    all_.all_reduce(sum);
    return sum.item<double>() / world_.size();
  }

  // As many calls on every rank, so that none computes alone at the end.
  int64_t agreed(int64_t calls) const {
    return std::max<int64_t>(
        1, static_cast<int64_t>(average(static_cast<double>(calls))));
  }

  World& world_;
  Group all_;
};

torch::Dtype dtype_of(Precision precision) {
  if (precision == Precision::bf16) return torch::kBFloat16;
  return precision == Precision::fp16 ? torch::kFloat16 : torch::kFloat32;
}

std::vector<MatrixRate> matrix_rates(Meter& meter, Precision precision) {
  const auto options = torch::dtype(dtype_of(precision)).device(meter.device());
  std::vector<MatrixRate> rates;
  for (int64_t m : meter.on_gpu() ? kGpuRows : kProcessorRows) {
    for (int64_t n : meter.on_gpu() ? kGpuSides : kProcessorSides) {
      for (int64_t k : meter.on_gpu() ? kGpuSides : kProcessorSides) {
        const Tensor a = torch::full({m, k}, 0.5, options);
        const Tensor b = torch::full({n, k}, 0.5, options).t();
        const Tensor c = torch::empty({m, n}, options);
        const double seconds = meter.seconds_of([&] {
          Tensor out = c;
          torch::mm_out(out, a, b);
        });
        const double flops = 2.0 * static_cast<double>(m) *
                             static_cast<double>(n) * static_cast<double>(k);
        rates.push_back({precision, m, n, k, flops / seconds});
      }
    }
  }
  return rates;
}

double memory_rate(Meter& meter) {
  const int64_t numel = meter.on_gpu() ? 64 << 20 : 8 << 20;
  const auto options = torch::dtype(torch::kFloat32).device(meter.device());
  const Tensor a = torch::ones({numel}, options);
  const Tensor b = torch::ones({numel}, options);
  Tensor c = torch::ones({numel}, options);
  const double seconds = meter.seconds_of([&] { torch::add_out(c, a, b); });
  return 3 * 4 * static_cast<double>(numel) / seconds;
}

double launch_seconds(Meter& meter) {
  const Tensor a = torch::ones({16}, torch::device(meter.device()));
  return meter.seconds_of([&] { const Tensor sum = a + a; });
}

}  // namespace

MachineMeasurement bench_machine(World& world) {
  const torch::NoGradGuard no_grad;
  Meter meter(world);
  MachineMeasurement measured;
  measured.ranks = world.size();
  std::vector<Precision> precisions = {Precision::fp32, Precision::bf16};
  if (meter.on_gpu()) precisions.push_back(Precision::fp16);
  for (Precision precision : precisions) {
    const auto rates = matrix_rates(meter, precision);
    measured.matrix_rates.insert(
        measured.matrix_rates.end(), rates.begin(), rates.end());
  }
  measured.memory_bytes_per_second = memory_rate(meter);
  measured.launch_seconds = launch_seconds(meter);
  if (world.size() == 1) return measured;
  BenchOptions options;
  options.backends = {
      meter.on_gpu() ? BackendKind::nccl : BackendKind::local};
  options.bytes = {4 << 10, 1 << 20, 16 << 20};
  for (const auto& row : bench_collectives(world, options)) {
    measured.calls.push_back(
        {row.operation, row.bytes, row.median_microseconds * 1e-6});
  }
  return measured;
}

}  // namespace echelon
