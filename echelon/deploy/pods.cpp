#include "echelon/deploy/pods.h"

#include <filesystem>

#include "echelon/deploy/engines.h"
#include "echelon/text/format.h"

namespace echelon::deploy {
namespace {

constexpr const char* kInstance = "app.kubernetes.io/instance";
constexpr const char* kConfigurations = "/etc/echelon";
constexpr int kMasterPort = 29500;

bool is_claim(const Settings& settings) {
  return !settings.volume.empty() && settings.volume[0] != '/';
}

// Where the run's folder is, and all paths of the configuration that are not
// absolute.
std::string folder_of_pods(const Settings& settings) {
  return settings.volume.empty() || is_claim(settings) ? settings.mount
                                                       : settings.volume;
}

// A key of a ConfigMap. The file keeps its name, which [train] run may use.
std::string configuration_key(const Workload& workload) {
  std::string key = std::filesystem::path(workload.file).filename().string();
  for (char& c : key) {
    const bool allowed = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                         (c >= '0' && c <= '9') || c == '-' || c == '_' ||
                         c == '.';
    if (!allowed) c = '-';
  }
  return key;
}

Json volumes(const Workload& workload, const Settings& settings) {
  Json list = Json::array();
  list.push_back(
      {{"name", "configuration"},
       {"configMap", {{"name", settings.name + "-config"}}}});
  if (is_claim(settings)) {
    list.push_back(
        {{"name", "run"},
         {"persistentVolumeClaim", {{"claimName", settings.volume}}}});
  } else if (!settings.volume.empty()) {
    list.push_back(
        {{"name", "run"},
         {"hostPath", {{"path", settings.volume}, {"type", "Directory"}}}});
  } else {
    list.push_back({{"name", "run"}, {"emptyDir", Json::object()}});
  }
  if (workload.gpus) {
    list.push_back(
        {{"name", "shared-memory"}, {"emptyDir", {{"medium", "Memory"}}}});
  }
  return list;
}

Json mounts(const Workload& workload, const Settings& settings) {
  Json list = Json::array();
  list.push_back(
      {{"name", "configuration"},
       {"mountPath", kConfigurations},
       {"readOnly", true}});
  list.push_back({{"name", "run"}, {"mountPath", folder_of_pods(settings)}});
  // NCCL's ranks of a host exchange tensors there; a container has 64 MiB.
  if (workload.gpus) {
    list.push_back({{"name", "shared-memory"}, {"mountPath", "/dev/shm"}});
  }
  return list;
}

// Pods beside each other in a domain of nodes: what tensor parallelism sends
// goes over NVLink. Where its groups fit in a host, that is a wish.
Json affinity(const Workload& workload, const Settings& settings) {
  const Json term = {
      {"labelSelector", {{"matchLabels", {{kInstance, settings.name}}}}},
      {"topologyKey", settings.topology}};
  if (workload.hosts_of_tp() > 1) {
    return {
        {"podAffinity",
         {{"requiredDuringSchedulingIgnoredDuringExecution",
           Json::array({term})}}}};
  }
  return {
      {"podAffinity",
       {{"preferredDuringSchedulingIgnoredDuringExecution",
         Json::array({{{"weight", 100}, {"podAffinityTerm", term}}})}}}};
}

Json kueue_topology(const Workload& workload, const Settings& settings) {
  const int64_t slice = workload.hosts_of_tp();
  if (slice <= 1) {
    return {{"kueue.x-k8s.io/podset-preferred-topology", settings.topology}};
  }
  if (slice == workload.hosts) {
    return {{"kueue.x-k8s.io/podset-required-topology", settings.topology}};
  }
  return {
      {"kueue.x-k8s.io/podset-slice-required-topology", settings.topology},
      {"kueue.x-k8s.io/podset-slice-size", std::to_string(slice)}};
}

}  // namespace

const std::vector<int>& final_codes() {
  static const std::vector<int> codes = {2, 3, 4, 93};
  return codes;
}

Json object_of(
    const std::string& api, const std::string& kind, const std::string& name,
    const Settings& settings, bool of_cluster) {
  Json metadata = {{"name", name}};
  if (!of_cluster && !settings.name_space.empty()) {
    metadata["namespace"] = settings.name_space;
  }
  metadata["labels"] = job_labels(settings);
  return {{"apiVersion", api}, {"kind", kind}, {"metadata", metadata}};
}

Json job_labels(const Settings& settings) {
  return {{"app.kubernetes.io/name", "echelon"}, {kInstance, settings.name}};
}

Json pod_resources(const Workload& workload) {
  Json resources = {
      {"cpu", std::to_string(workload.cores_per_host)},
      {"memory", memory_text(workload.memory_bytes, false)}};
  if (workload.gpus) {
    resources[kGpuResource] = std::to_string(workload.ranks_per_host);
  }
  return resources;
}

std::vector<std::string> pod_command(
    const Workload& workload, const Settings& settings,
    const PodNumbers& numbers) {
  auto words = train_command(
      workload, format("{}/{}", kConfigurations, configuration_key(workload)),
      numbers.own, numbers.master);
  if (settings.metrics_port > 0) {
    words.insert(
        words.end(),
        {"--metrics-address", format("0.0.0.0:{}", settings.metrics_port)});
  }
  return words;
}

Json pod_template(
    Engine engine, const Workload& workload, const Settings& settings,
    const PodNumbers& numbers) {
  Json metadata = {{"labels", job_labels(settings)}};
  Json spec;
  if (engine == Engine::kai) {
    metadata["labels"]["kai.scheduler/queue"] = settings.queue;
    spec["schedulerName"] = "kai-scheduler";
  }
  if (engine != Engine::lws) spec["restartPolicy"] = "Never";
  spec["terminationGracePeriodSeconds"] = workload.grace_seconds;
  if (!settings.topology.empty()) {
    if (engine == Engine::kueue) {
      metadata["annotations"] = kueue_topology(workload, settings);
    } else {
      spec["affinity"] = affinity(workload, settings);
    }
  }
  Json container = {
      {"name", kContainer},
      {"image", settings.image},
      {"command", pod_command(workload, settings, numbers)},
      {"workingDir", folder_of_pods(settings)}};
  // For `echelon job`, which asks the job in its pod.
  const auto own = [](const char* name, const char* field) -> Json {
    return {
        {"name", name}, {"valueFrom", {{"fieldRef", {{"fieldPath", field}}}}}};
  };
  container["env"] = Json::array(
      {own("POD_NAME", "metadata.name"),
       own("POD_NAMESPACE", "metadata.namespace")});
  if (workload.hosts > 1) {
    container["env"].push_back(
        {{"name", "ECHELON_TOKEN"},
         {"valueFrom",
          {{"secretKeyRef",
            {{"name", settings.name + "-token"}, {"key", "token"}}}}}});
  }
  if (workload.object_storage) {
    container["envFrom"] =
        Json::array({{{"secretRef", {{"name", settings.name + "-storage"}}}}});
  }
  Json ports = Json::array();
  if (workload.hosts > 1) {
    ports.push_back({{"name", "launcher"}, {"containerPort", kMasterPort}});
  }
  if (settings.metrics_port > 0) {
    ports.push_back(
        {{"name", "metrics"}, {"containerPort", settings.metrics_port}});
  }
  if (!ports.empty()) container["ports"] = ports;
  container["resources"] = {
      {"requests", pod_resources(workload)},
      {"limits", pod_resources(workload)}};
  container["volumeMounts"] = mounts(workload, settings);
  spec["containers"] = Json::array({container});
  spec["volumes"] = volumes(workload, settings);
  return {{"metadata", metadata}, {"spec", spec}};
}

std::vector<Manifest>
companions(const Workload& workload, const Settings& settings) {
  std::vector<Manifest> list;
  if (workload.hosts > 1 && !settings.token.empty()) {
    Json secret = object_of("v1", "Secret", settings.name + "-token", settings);
    secret["immutable"] = true;
    secret["type"] = "Opaque";
    secret["stringData"] = {{"token", settings.token}};
    list.push_back(
        {"The secret that the job's hosts prove to each other that they have. "
         "Keep this file as you would keep a password.",
         secret});
  }
  Json map = object_of("v1", "ConfigMap", settings.name + "-config", settings);
  map["data"] = {{configuration_key(workload), workload.configuration}};
  list.push_back({"The configuration, as it was given.", map});
  const int64_t available =
      workload.elastic() ? workload.fewest_that_fit : workload.hosts - 1;
  if (workload.hosts > 1 && available > 0) {
    Json budget =
        object_of("policy/v1", "PodDisruptionBudget", settings.name, settings);
    budget["spec"] = {
        {"minAvailable", available},
        {"selector", {{"matchLabels", {{kInstance, settings.name}}}}}};
    list.push_back(
        {workload.elastic()
             ? "Nodes are drained only while enough hosts for the smallest "
               "layout are left."
             : "Nodes are drained one at a time: each time the job saves and "
               "starts again.",
         budget});
  }
  if (settings.metrics_port > 0) {
    Json monitor = object_of(
        "monitoring.coreos.com/v1", "PodMonitor", settings.name, settings);
    monitor["spec"] = {
        {"selector", {{"matchLabels", {{kInstance, settings.name}}}}},
        {"podMetricsEndpoints", Json::array(
                                    {{{"port", "metrics"},
                                      {"path", "/metrics"},
                                      {"interval", "15s"}}})}};
    list.push_back({"Prometheus reads the launchers' metrics.", monitor});
  }
  return list;
}

Manifest headless_service(const Settings& settings) {
  Json service = object_of("v1", "Service", settings.name, settings);
  service["spec"] = {
      {"clusterIP", "None"},
      {"publishNotReadyAddresses", true},
      {"selector", {{kInstance, settings.name}}}};
  return {"Each pod has a name by which the others find it.", service};
}

}  // namespace echelon::deploy
