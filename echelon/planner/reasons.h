// Explains plans, and why there is none, in plain words with numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/planner/plan.h"
#include "echelon/planner/search_space.h"

namespace echelon::planner {

/// Why `best` is as it is.
Reason explain_best(const PlanRequest& request, const Plan& best);

/// What `closest` lacks. `smallest` is a plan for the smallest sufficient
/// cluster, if there is one.
Reason explain_nothing_fits(
    const PlanRequest& request, const Plan& closest,
    const std::optional<Plan>& smallest);

/// "takes 31.2 s, 1.8 times as long: tp communicates 12 s, not 2.3 s".
std::string explain_slower(const Plan& slower, const Plan& best);

/// "needs 2.6 TiB of the 74 GiB that a device has: optimizer state 1.9 TiB, …".
std::string explain_unfit(const PlanRequest& request, const Plan& plan);

/// The share of the step that computes the model, without recompute.
double computing_share(const cost::StepEstimate& step);

/// Bytes that a job may use of the plan's fullest device.
double usable_fullest_bytes(const PlanRequest& request, const Plan& plan);

/// Bytes that a job may use of a device of the smallest kind.
double usable_device_bytes(const cluster::Cluster& cluster);

/// Why a job has no strategy at all, whatever the memory: the smallest set of
/// contradictory constraints, or the batch that no layout divides, with the
/// nearest ones that some layout does. For a message.
std::string explain_impossible(const SearchJob& job);

/// The same as a clause: "a batch of 1,536 samples does not divide by 1,024
/// ranks".
std::string why_none(const SearchJob& job);

/// The values that a setting may have here, ascending, among the groups and
/// variants of the job and its savings of memory.
std::vector<int64_t> values_of(const SearchJob& job, const SearchKey& key);

}  // namespace echelon::planner
