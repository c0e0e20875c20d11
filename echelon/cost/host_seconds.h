// What a processor's host does beside the operators of its layers.
#pragma once

#include "echelon/cluster/device.h"
#include "echelon/cost/operation.h"
#include "echelon/cost/pass_times.h"
#include "echelon/cost/stack.h"
#include "echelon/cost/strategy.h"

namespace echelon {

/// How many kinds of operators compute something in these layers: by name,
/// forwards and of gradients. Views are none.
double operator_kinds(const Layers& layers);

/// What the trainer does beside layers of which a rank computes so long for a
/// microbatch: linear between what was measured, all 0 where nothing was.
HostWork host_work_beside(const Device& device, double computing_seconds);

/// The same beside what the stack computes; all 0 where it does not say.
HostWork host_work_of(const Stack& stack, const Device& device);

/// Of an action of a pipeline that computes forwards or gradients of inputs; 0
/// without a pipeline.
double action_host_seconds(
    const Strategy& strategy, const Stack& stack, const Device& device);

/// Of a step, on a rank with these layers: also what their operators take
/// longer when they begin anew, in the first microbatch.
double step_host_seconds(
    const Strategy& strategy, const Stack& stack, const Device& device,
    const Layers& layers);

}  // namespace echelon
