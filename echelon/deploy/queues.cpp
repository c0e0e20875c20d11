// The projects of a pool as the queues of Kueue and KAI.
#include "echelon/deploy/queues.h"

#include <algorithm>
#include <utility>

#include "echelon/text/format.h"

namespace echelon::deploy {
namespace {

// What this job's hosts have for each rank is taken for the share of a device.
int64_t cores_of_device(const Workload& workload) {
  return std::max<int64_t>(
      1, workload.cores_per_host / workload.ranks_per_host);
}

int64_t gibibytes_of_device(const Workload& workload) {
  const int64_t bytes = workload.memory_bytes / workload.ranks_per_host;
  return std::max<int64_t>(1, ((bytes - 1) >> 30) + 1);
}

bool is_parent(const Settings& settings, const std::string& name) {
  return std::ranges::any_of(settings.projects, [&](const Project& project) {
    return project.parent == name;
  });
}

std::string weight_text(double weight) {
  return format("{}", weight);
}

constexpr const char* kFlavor = "echelon";

// Queues outlive the job: they are not labelled as its own.
Json queue_of(
    const std::string& api, const std::string& kind, const std::string& name,
    const Settings& settings, bool of_cluster = false) {
  Json object = object_of(api, kind, name, settings, of_cluster);
  object["metadata"].erase("labels");
  return object;
}

}  // namespace

std::vector<Manifest>
kueue_queues(const Workload& workload, const Settings& settings) {
  std::vector<Manifest> list;
  if (settings.projects.empty()) return list;
  list.push_back(
      {"The nodes that the projects share: all of them. Give it nodeLabels to "
       "choose some.",
       queue_of(
           "kueue.x-k8s.io/v1beta2", "ResourceFlavor", kFlavor, settings,
           true)});
  for (const Project& project : settings.projects) {
    if (!is_parent(settings, project.name)) continue;
    Json cohort = queue_of(
        "kueue.x-k8s.io/v1beta2", "Cohort", project.name, settings, true);
    cohort["spec"] = {
        {"parentName", project.parent.empty() ? kFlavor : project.parent},
        {"fairSharing", {{"weight", weight_text(project.weight)}}}};
    list.push_back({"Projects that share what they leave.", cohort});
  }
  for (const Project& project : settings.projects) {
    if (is_parent(settings, project.name)) continue;
    std::vector<std::pair<std::string, int64_t>> units = {
        {"cpu", cores_of_device(workload)},
        {"memory", gibibytes_of_device(workload)}};
    if (workload.gpus) units.insert(units.begin(), {kGpuResource, 1});
    Json covered = Json::array(), resources = Json::array();
    for (const auto& [name, unit] : units) {
      const char* suffix = name == "memory" ? "Gi" : "";
      Json resource = {
          {"name", name},
          {"nominalQuota", format("{}{}", unit * project.guaranteed, suffix)}};
      if (project.limit >= 0) {
        resource["borrowingLimit"] =
            format("{}{}", unit * (project.limit - project.guaranteed), suffix);
      }
      covered.push_back(name);
      resources.push_back(resource);
    }
    Json queue = queue_of(
        "kueue.x-k8s.io/v1beta2", "ClusterQueue", project.name, settings, true);
    queue["spec"] = {
        {"cohortName", project.parent.empty() ? kFlavor : project.parent},
        {"namespaceSelector", Json::object()},
        {"preemption",
         {{"reclaimWithinCohort", "Any"},
          {"withinClusterQueue", "LowerPriority"}}},
        {"fairSharing", {{"weight", weight_text(project.weight)}}},
        {"resourceGroups",
         Json::array(
             {{{"coveredResources", covered},
               {"flavors",
                Json::array(
                    {{{"name", kFlavor}, {"resources", resources}}})}}})}};
    list.push_back(
        {format(
             "{} devices of {} are guaranteed. Cores and memory are what this "
             "job takes for each device; raise them for jobs that take more.",
             project.guaranteed, project.name),
         queue});
    Json local = queue_of(
        "kueue.x-k8s.io/v1beta2", "LocalQueue", project.name, settings);
    local["spec"] = {{"clusterQueue", project.name}};
    list.push_back({"Where jobs of this namespace queue.", local});
  }
  return list;
}

std::vector<Manifest>
kai_queues(const Workload& workload, const Settings& settings) {
  std::vector<Manifest> list;
  const auto share = [](double unit, const Project& project) {
    return Json{
        {"quota", unit * static_cast<double>(project.guaranteed)},
        {"limit",
         project.limit < 0 ? -1.0 : unit * static_cast<double>(project.limit)},
        {"overQuotaWeight", project.weight}};
  };
  const Json unlimited = {{"quota", -1}, {"limit", -1}, {"overQuotaWeight", 1}};
  for (const Project& project : settings.projects) {
    Json queue =
        queue_of("scheduling.run.ai/v2", "Queue", project.name, settings, true);
    Json spec;
    if (!project.parent.empty()) spec["parentQueue"] = project.parent;
    // KAI counts a core as 1,000.
    spec["resources"] = {
        {"gpu", workload.gpus ? share(1, project) : unlimited},
        {"cpu", workload.gpus ? unlimited
                              : share(
                                    1000.0 * static_cast<double>(
                                                 cores_of_device(workload)),
                                    project)},
        {"memory", unlimited}};
    queue["spec"] = spec;
    list.push_back(
        {format(
             "{} devices of {} are guaranteed{}.", project.guaranteed,
             project.name,
             project.limit < 0
                 ? ""
                 : format(", and it has {} at most", project.limit)),
         queue});
  }
  return list;
}

}  // namespace echelon::deploy
