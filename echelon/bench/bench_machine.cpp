#include "echelon/bench/bench_machine.h"

#include <ATen/Parallel.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "echelon/bench/bench_collectives.h"
#include "echelon/bench/bench_fits.h"
#include "echelon/bench/bench_host_work.h"
#include "echelon/bench/bench_jitter.h"
#include "echelon/bench/bench_operators.h"
#include "echelon/bench/bench_products.h"

namespace echelon {
namespace {

// The rate of the largest stream.
double stream_rate(const std::vector<OperatorRate>& rates) {
  const OperatorRate* largest = nullptr;
  for (const auto& rate : rates) {
    if (rate.name != "add") continue;
    if (largest == nullptr || rate.bytes > largest->bytes) largest = &rate;
  }
  return largest->bytes_per_second;
}

double sum_of(const std::vector<LaunchRate>& rates) {
  double sum = 0;
  for (const LaunchRate& rate : rates) {
    sum += rate.seconds + rate.backward_seconds + rate.view_seconds +
           rate.backward_view_seconds;
  }
  return sum;
}

void add_calls(BenchMeter& meter, World& world, MachineMeasurement& measured) {
  BenchOptions options;
  options.backends = {meter.on_gpu() ? BackendKind::nccl : BackendKind::local};
  options.bytes = {4 << 10, 1 << 20, 16 << 20};
  for (const auto& row : bench_collectives(world, options)) {
    measured.calls.push_back(
        {row.operation, row.bytes, row.median_microseconds * 1e-6});
  }
}

}  // namespace

MachineMeasurement bench_machine(World& world) {
  at::set_num_threads(world.compute_threads());  // as the trainer has them
  BenchMeter meter(world);
  MachineMeasurement measured;
  measured.ranks = world.size();
  // What others do to the cores, for seconds at a time, makes ranks uneven and
  // launches slow: three times are apart.
  std::vector<std::vector<LaunchRate>> launches;
  std::vector<double> jitter;
  const auto look = [&] {
    if (meter.on_gpu()) return;
    const torch::AutoGradMode gradients(true);
    launches.push_back(bench_launches(meter));
    jitter.push_back(bench_jitter(meter, world));
  };
  const torch::NoGradGuard no_grad;
  look();
  measured.matrix_rates = bench_products(meter);
  look();
  measured.operator_rates = bench_operators(meter);
  look();
  if (meter.on_gpu()) {
    measured.launch_seconds = meter.seconds_of(smallest_call(meter.device()));
  } else {
    measured.launch_rates = *std::min_element(
        launches.begin(), launches.end(),
        [](const auto& a, const auto& b) { return sum_of(a) < sum_of(b); });
    measured.launch_seconds = measured.launch_rates.front().seconds;
    measured.jitter_seconds =
        median(std::move(jitter));  // a difference of times
  }
  measured.memory_bytes_per_second = stream_rate(measured.operator_rates);
  if (world.size() > 1) add_calls(meter, world, measured);
  if (!meter.on_gpu()) {
    const torch::AutoGradMode gradients(true);
    measured.host_work = bench_host_work(meter, world, measured);
  }
  measured.repeated = meter.repeated();
  return measured;
}

}  // namespace echelon
