// What the trainer itself takes the host of a step, beside the operators of a network.
#pragma once

#include "echelon/cluster/measured_machine.h"
#include "echelon/train/bench_meter.h"

namespace echelon {

/// Collective, of a processor. Networks that compute next to nothing are trained for
/// some steps, data parallel and in a pipeline of all ranks: by how much they take
/// longer than the simulator says of `measured`, whose host has no work yet, and how
/// that grows with microbatches and layers. One rank: no pipeline.
HostWork bench_host_work(
    BenchMeter& meter, World& world, MachineMeasurement measured);

}  // namespace echelon
