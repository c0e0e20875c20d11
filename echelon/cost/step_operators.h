// The operators that a step consists of, each with its time on a device: what
// to make faster first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {

/// What bounds the time of an operator.
enum class Bound {
  products,     // matmuls, convolutions, attention: the device's FLOPs
  memory,       // the bytes that it moves
  launches,     // its kernels are over before the device has begun the next
  collectives,  // the links between ranks
};

/// "matmuls" (with attention), "memory", "launches", "collectives".
std::string_view to_string(Bound bound);

/// Equal calls of one operator: of one name, shape and pass.
struct StepOperator {
  std::string name;   // "mm"
  std::string shape;  // "[4096,1600]x[1600,6400]", "25.0 MiB"
  Bound bound = Bound::memory;
  bool backward = false;  // also recomputation
  double calls = 0;       // in a step
  double seconds = 0;     // of all calls in a step
};

struct StepOperators {
  std::vector<StepOperator> operators;  // most seconds first
  double seconds = 0;                   // of all of them
  double kernels = 0;                   // that a step launches
  double views = 0;                     // operators of a step without a kernel
  double launch_seconds = 0;  // of the host, for all of these, in a step; 0
                              // where steps are CUDA graphs
  double waits = 0;           // of the device for the host, in a step

  /// Seconds of the operators with this bound.
  double seconds_of(Bound bound) const;
};

/// The operators of the pipeline rank that computes longest, in the layers of
/// its stages; optimizer and collectives of parameters and gradients are not
/// among them. Throws ConfigError as stage_work does.
StepOperators step_operators(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster);

}  // namespace echelon::cost
