#include "echelon/bench/bench_machine.h"

#include <ATen/Parallel.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <vector>

#include "echelon/bench/bench_collectives.h"
#include "echelon/bench/bench_rates.h"

namespace echelon::bench {
namespace {

// The rate of the largest stream.
double stream_rate(const std::vector<cluster::OperatorRate>& rates) {
  const cluster::OperatorRate* largest = nullptr;
  for (const auto& rate : rates) {
    if (rate.name != "add") continue;
    if (largest == nullptr || rate.bytes > largest->bytes) largest = &rate;
  }
  return largest->bytes_per_second;
}

void add_calls(
    BenchMeter& meter, World& world, cluster::MachineMeasurement& measured) {
  BenchOptions options;
  options.backends = {meter.on_gpu() ? BackendKind::nccl : BackendKind::local};
  options.bytes = {4 << 10, 1 << 20, 16 << 20};
  for (const auto& row : bench_collectives(world, options)) {
    measured.calls.push_back(
        {row.operation, row.bytes, row.median_microseconds * 1e-6});
  }
}

}  // namespace

cluster::MachineMeasurement bench_machine(World& world) {
  at::set_num_threads(world.compute_threads());  // as the trainer does
  BenchMeter meter(world);
  cluster::MachineMeasurement measured;
  measured.ranks = world.size();
  if (!meter.on_gpu()) {
    const torch::AutoGradMode gradients(true);
    measured.launch_rates = bench_launches(meter);
  }
  const torch::NoGradGuard no_grad;
  measured.matrix_rates = bench_matmuls(meter);
  measured.operator_rates = bench_operators(meter);
  measured.launch_seconds =
      meter.on_gpu() ? meter.seconds_of(smallest_call(meter.device()))
                     : measured.launch_rates.front().seconds;
  measured.memory_bytes_per_second = stream_rate(measured.operator_rates);
  if (world.size() > 1) add_calls(meter, world, measured);
  return measured;
}

}  // namespace echelon::bench
