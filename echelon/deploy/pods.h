// The objects of Kubernetes that several engines share.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "echelon/deploy/deploy.h"

namespace echelon::deploy {

using Json = nlohmann::ordered_json;

/// One manifest, and what it is for: a comment above it.
struct Manifest {
  std::string why;
  Json object;
};

/// A GPU, as nodes and pods call it.
inline constexpr const char* kGpuResource = "nvidia.com/gpu";

/// The container of each pod, which failure policies name.
inline constexpr const char* kContainer = "echelon";

/// apiVersion, kind and metadata; other members are added to it. Objects of the
/// whole cluster have no namespace.
Json object_of(
    const std::string& api, const std::string& kind, const std::string& name,
    const Settings& settings, bool of_cluster = false);

/// The labels of everything that belongs to the job.
Json job_labels(const Settings& settings);

/// How a pod knows its number, and where it finds the first one.
struct PodNumbers {
  std::string own;     // "$(JOB_COMPLETION_INDEX)"
  std::string master;  // "first-hosts-0-0.first"
};

/// metadata and spec of a pod: the launcher of one host, with volumes, secret
/// and resources.
Json pod_template(
    Engine engine, const Workload& workload, const Settings& settings,
    const PodNumbers& numbers);

/// requests, or limits, of a pod.
Json pod_resources(const Workload& workload);

/// `echelon train …` as the pods start it.
std::vector<std::string> pod_command(
    const Workload& workload, const Settings& settings,
    const PodNumbers& numbers);

/// What each job of Kubernetes has beside itself: Secret, ConfigMap,
/// PodDisruptionBudget and PodMonitor.
std::vector<Manifest>
companions(const Workload& workload, const Settings& settings);

/// A name for each pod of a Job with this name, in a domain of the job's.
Manifest headless_service(const Settings& settings);

/// The exit codes after which another start would end in the same way.
const std::vector<int>& final_codes();

}  // namespace echelon::deploy
