// A plan's reasons in plain words, with numbers.
#pragma once

#include <string>

#include "echelon/planner/plan.h"

namespace echelon {

/// Why `best` is as it is.
Reason explain_best(const PlanRequest& request, const Plan& best);

/// What `closest` lacks; `smallest` is on the smallest cluster that would do,
/// when there is one.
Reason explain_nothing_fits(
    const PlanRequest& request, const Plan& closest,
    const std::optional<Plan>& smallest);

/// "takes 31.2 s, 1.8 times as long: tp communicates 12 s, not 2.3 s".
std::string explain_slower(const Plan& slower, const Plan& best);

/// "needs 2.6 TiB of the 74 GiB that a device has: optimizer state 1.9 TiB, …".
std::string explain_unfit(const PlanRequest& request, const Plan& plan);

/// The share of the step that computes what the model asks for.
double computing_share(const StepEstimate& step);

/// Bytes that a job may use of the plan's fullest device.
double usable_fullest_bytes(const PlanRequest& request, const Plan& plan);

/// Bytes that a device of the cluster may use: of the smallest kind.
double usable_device_bytes(const Cluster& cluster);

}  // namespace echelon
