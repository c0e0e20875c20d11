// The queues of the projects that share a cluster. They outlive the job.
#pragma once

#include <vector>

#include "echelon/deploy/pods.h"

namespace echelon::deploy {

/// ClusterQueues, Cohorts and LocalQueues of Kueue, and a ResourceFlavor of all
/// nodes. A device stands for the cores and the memory that this job takes for
/// each. Empty without projects.
std::vector<Manifest>
kueue_queues(const Workload& workload, const Settings& settings);

/// Queues of KAI. Empty without projects.
std::vector<Manifest>
kai_queues(const Workload& workload, const Settings& settings);

}  // namespace echelon::deploy
