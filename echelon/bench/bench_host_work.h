// What the trainer itself takes the host of a step, beside the operators of a
// network.
#pragma once

#include <vector>

#include "echelon/bench/bench_meter.h"
#include "echelon/cluster/measured_machine.h"

namespace echelon {

/// Collective, of a processor. Networks that compute next to nothing are
/// trained for some steps, data parallel and in a pipeline of all ranks: by how
/// much they take longer than the simulator says of `measured`, whose host has
/// no work yet, and how that grows with microbatches and layers. Once with
/// nothing else between; then behind passes of another network, short and long,
/// which leave the trainer's code cold: by how much more than layers by
/// themselves do behind them. One rank: no pipeline.
std::vector<HostWork>
bench_host_work(BenchMeter& meter, World& world, MachineMeasurement measured);

}  // namespace echelon
