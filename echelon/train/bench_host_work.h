// What the trainer itself takes the host of a step, beside the operators of a network.
#pragma once

#include "echelon/cluster/measured_machine.h"
#include "echelon/train/bench_meter.h"

namespace echelon {

/// Collective, of a processor. Networks that compute next to nothing are trained for
/// some steps, data parallel and in a pipeline of all ranks: what more microbatches,
/// more layers and a pipeline add, and what is left of a step without them. One rank:
/// no pipeline. `measured`: its collectives, which are no work of the host.
HostWork bench_host_work(
    BenchMeter& meter, World& world, const MachineMeasurement& measured);

}  // namespace echelon
