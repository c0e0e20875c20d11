// Manifests. A host of the job is a pod, whose first process is the launcher: a
// pod that is evicted gets SIGTERM, its launcher tells the others, all save and
// end with 75. What follows an end is told to the engine by exit code, so that
// a job that saved starts again as often as it must, and one that would fail in
// the same way does not start again.
#include <algorithm>
#include <set>

#include "echelon/deploy/engines.h"
#include "echelon/deploy/names.h"
#include "echelon/deploy/pods.h"
#include "echelon/deploy/queues.h"
#include "echelon/deploy/schemas.h"
#include "echelon/deploy/yaml.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::deploy {
namespace {

constexpr const char* kHosts = "hosts";  // the replicated job of a JobSet
constexpr const char* kIndex = "$(JOB_COMPLETION_INDEX)";
constexpr int kSaved = 75;

// What the pods of an engine are called: the job's name, then this.
std::string pod_suffix(Engine engine, const Workload& workload) {
  const int64_t last = workload.hosts - 1;
  switch (engine) {
    case Engine::trainer:
      return format("-node-0-{}-abcde", last);
    case Engine::lws:
      // Also a label of its StatefulSets, with a hash of ten characters.
      return format("-0-{}", std::max<int64_t>(last, 1'000'000'000));
    default:
      return workload.elastic() ? format("-{}-abcde", last)
                                : format("-{}-0-{}-abcde", kHosts, last);
  }
}

void check_manifest(
    Engine engine, const Workload& workload, const Settings& settings) {
  const std::string suffix = pod_suffix(engine, workload);
  check_dns_label(
      "--name", settings.name, 63 - suffix.size(),
      engine == Engine::lws
          ? "its pods carry a label of 63 characters with the name and a hash"
          : format(
                "its pods are called NAME{}, with 63 characters at most",
                suffix));
  if (!settings.name_space.empty()) {
    check_object_name("--namespace", settings.name_space, false);
  }
  if (settings.image.empty()) {
    throw ConfigError(format(
        "--image is missing: what the pods of --to {} run, as in --image "
        "registry.example/echelon:0.1; the Dockerfile of Echelon makes one",
        to_string(engine)));
  }
  check_word("--image", settings.image);
  if (!settings.topology.empty()) {
    check_label_key("--topology", settings.topology);
  }
  const bool queued = engine == Engine::kueue || engine == Engine::kai;
  if (queued && settings.queue.empty()) {
    throw ConfigError(format(
        "--queue is missing: the {} that the job waits in",
        engine == Engine::kueue ? "LocalQueue of its namespace"
                                : "Queue of KAI"));
  }
  if (queued) check_label_value("--queue", settings.queue);
  if (!settings.volume.empty() && settings.volume[0] != '/') {
    check_object_name("--volume", settings.volume, true);
  }
  if (settings.mount.empty() || settings.mount[0] != '/') {
    throw ConfigError(format(
        "--mount {}: is an absolute folder of the pods, as in /work",
        settings.mount));
  }
  if (workload.hosts > 1 && workload.saves && settings.volume.empty()) {
    throw ConfigError(format(
        "--volume is missing: {} must see the run's folder {}; name a claim "
        "(ReadWriteMany), or a folder that all nodes have. A run that saves "
        "no checkpoints needs none",
        counted(workload.hosts, "host"), workload.run));
  }
  if (engine == Engine::kueue && workload.elastic() &&
      !settings.topology.empty()) {
    throw ConfigError(
        "--topology: Kueue does not place jobs by topology whose hosts come "
        "and go; give --nnodes one number, or leave --topology out");
  }
}

// --- The JobSet of a fixed number of hosts -----------------------------------

// Ends the Job of a JobSet at once for the codes that say what comes next.
Json job_failure_policy() {
  std::vector<int> codes = final_codes();
  codes.push_back(kSaved);
  return {
      {"rules", Json::array(
                    {{{"action", "FailJob"},
                      {"onPodConditions", Json::array(
                                              {{{"type", "DisruptionTarget"},
                                                {"status", "True"}}})}},
                     {{"action", "FailJob"},
                      {"onExitCodes",
                       {{"containerName", kContainer},
                        {"operator", "In"},
                        {"values", codes}}}}})}};
}

// The reasons are those that the Job gives: "… failed with exit code 75 …".
Json set_failure_policy(const Workload& workload) {
  std::vector<std::string> end;
  for (const int code : final_codes()) {
    end.push_back(format(".*exit code {} .*", code));
  }
  const auto rule = [](const char* name, const char* action,
                       const std::vector<std::string>& messages) {
    return Json{
        {"name", name},
        {"action", action},
        {"onJobFailureReasons", {"PodFailurePolicy"}},
        {"onJobFailureMessagePatterns", messages}};
  };
  constexpr const char* kUncounted = "RestartJobSetAndIgnoreMaxRestarts";
  return {
      {"maxRestarts", workload.max_restarts},
      {"rules",
       Json::array(
           {rule("mended", "FailJobSet", end),
            rule("saved", kUncounted, {format(".*exit code {} .*", kSaved)}),
            rule(
                "evicted", kUncounted, {".*condition DisruptionTarget .*"})})}};
}

Json job_spec(const Workload& workload, const Json& pod) {
  return {
      {"completionMode", "Indexed"},
      {"completions", workload.hosts},
      {"parallelism", workload.hosts},
      {"backoffLimit", 0},
      {"podFailurePolicy", job_failure_policy()},
      {"template", pod}};
}

Json job_set(
    Engine engine, const Workload& workload, const Settings& settings) {
  const PodNumbers numbers{
      .own = kIndex,
      .master = format("{}-{}-0-0.{}", settings.name, kHosts, settings.name)};
  Json set =
      object_of("jobset.x-k8s.io/v1alpha2", "JobSet", settings.name, settings);
  if (engine == Engine::kueue) {
    set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue;
  }
  if (engine == Engine::kai) {
    set["metadata"]["labels"]["kai.scheduler/queue"] = settings.queue;
    set["metadata"]["annotations"] = {
        {"kai.scheduler/batch-min-member", std::to_string(workload.hosts)}};
  }
  Json spec;
  if (engine == Engine::kueue) spec["suspend"] = true;  // until it is admitted
  spec["network"] = {
      {"enableDNSHostnames", true},
      {"publishNotReadyAddresses", true},
      {"subdomain", settings.name}};
  spec["failurePolicy"] = set_failure_policy(workload);
  spec["replicatedJobs"] = Json::array(
      {{{"name", kHosts},
        {"replicas", 1},
        {"template",
         {{"spec", job_spec(
                       workload,
                       pod_template(engine, workload, settings, numbers))}}}}});
  set["spec"] = spec;
  return set;
}

// --- The Job of hosts that come and go ---------------------------------------

Json elastic_job(
    Engine engine, const Workload& workload, const Settings& settings) {
  const PodNumbers numbers{
      .own = kIndex, .master = format("{}-0.{}", settings.name, settings.name)};
  Json job = object_of("batch/v1", "Job", settings.name, settings);
  int64_t hosts = workload.hosts;
  if (engine == Engine::kueue) {
    hosts = workload.fewest_that_fit;
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue;
    job["metadata"]["annotations"] = {{"kueue.x-k8s.io/elastic-job", "true"}};
  } else {
    job["metadata"]["labels"]["kai.scheduler/queue"] = settings.queue;
    job["metadata"]["annotations"] = {
        {"kai.scheduler/batch-min-member",
         std::to_string(workload.fewest_that_fit)}};
  }
  Json pod = pod_template(engine, workload, settings, numbers);
  pod["spec"]["subdomain"] = settings.name;
  Json spec = {
      {"completionMode", "Indexed"},
      {"completions", hosts},
      {"parallelism", hosts},
      {"backoffLimitPerIndex", workload.max_restarts},
      // Kubernetes takes no more of them than there are completions.
      {"maxFailedIndexes",
       std::min(hosts, workload.hosts - workload.fewest_that_fit)},
      {"podFailurePolicy",
       {{"rules", Json::array(
                      {{{"action", "Ignore"},
                        {"onPodConditions", Json::array(
                                                {{{"type", "DisruptionTarget"},
                                                  {"status", "True"}}})}},
                       {{"action", "Ignore"},
                        {"onExitCodes",
                         {{"containerName", kContainer},
                          {"operator", "In"},
                          {"values", {kSaved}}}}},
                       {{"action", "FailJob"},
                        {"onExitCodes",
                         {{"containerName", kContainer},
                          {"operator", "In"},
                          {"values", final_codes()}}}}})}}},
      {"template", pod}};
  if (engine == Engine::kueue) spec["suspend"] = true;
  job["spec"] = spec;
  return job;
}

// --- Kubeflow trainer --------------------------------------------------------

std::vector<Manifest>
trainer_manifests(const Workload& workload, const Settings& settings) {
  const PodNumbers numbers{
      .own = kIndex,
      .master = format("{}-node-0-0.{}", settings.name, settings.name)};
  const std::string name = settings.name + "-runtime";
  Json runtime = object_of(
      "trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", name, settings,
      true);
  Json pod = pod_template(Engine::trainer, workload, settings, numbers);
  // The trainer knows the container by this name. What it runs is the
  // TrainJob's.
  Json& container = pod["spec"]["containers"][0];
  container["name"] = "node";
  for (const char* key : {"command", "resources"}) container.erase(key);
  Json policy = job_failure_policy();
  policy["rules"][1]["onExitCodes"]["containerName"] = "node";
  runtime["spec"] = {
      {"mlPolicy", {{"numNodes", workload.hosts}}},
      {"template",
       {{"spec",
         {{"network",
           {{"enableDNSHostnames", true},
            {"publishNotReadyAddresses", true},
            {"subdomain", settings.name}}},
          {"failurePolicy", set_failure_policy(workload)},
          {"replicatedJobs",
           Json::array(
               {{{"name", "node"},
                 {"template",
                  {{"metadata",
                    {{"labels",
                      {{"trainer.kubeflow.org/trainjob-ancestor-step",
                        "trainer"}}}}},
                   {"spec",
                    {{"backoffLimit", 0},
                     {"podFailurePolicy", policy},
                     {"template", pod}}}}}}})}}}}}};
  Json job = object_of(
      "trainer.kubeflow.org/v1alpha1", "TrainJob", settings.name, settings);
  job["spec"] = {
      {"runtimeRef",
       {{"apiGroup", "trainer.kubeflow.org"},
        {"kind", "ClusterTrainingRuntime"},
        {"name", name}}},
      {"trainer",
       {{"image", settings.image},
        {"command", pod_command(workload, settings, numbers)},
        {"numNodes", workload.hosts},
        {"resourcesPerNode",
         {{"requests", pod_resources(workload)},
          {"limits", pod_resources(workload)}}}}}};
  return {
      {"How the trainer starts Echelon: its files, its end, its restarts.",
       runtime},
      {"The job.", job}};
}

// --- LeaderWorkerSet ---------------------------------------------------------

// A LeaderWorkerSet starts its pods again whatever they end with. The shell
// keeps a pod whose job is over, or whose error must be mended, so that it is
// not started again. It hands on the order to stop, which may come before the
// job's number is known, and which ends its own `wait` early.
constexpr const char* kUntilDeleted =
    R"(trap 'stopped=yes; [ -z "$job" ] || kill -TERM "$job"' TERM
job= stopped=
"$@" &
job=$!
[ -z "$stopped" ] || kill -TERM "$job"
stopped=yes
while [ -n "$stopped" ]; do stopped=; wait "$job"; code=$?; done
case $code in
  0|2|3|4|93) echo "echelon ended with code $code: delete the LeaderWorkerSet" ;;
  *) exit "$code" ;;
esac
trap 'exit 0' TERM
[ -z "$stopped" ] || exit 0
while true; do sleep 3600 & wait $!; done
)";

Json leader_worker_set(const Workload& workload, const Settings& settings) {
  const PodNumbers numbers{
      .own = "$(LWS_WORKER_INDEX)", .master = "$(LWS_LEADER_ADDRESS)"};
  Json pod = pod_template(Engine::lws, workload, settings, numbers);
  Json& container = pod["spec"]["containers"][0];
  std::vector<std::string> command = {"bash", "-c", kUntilDeleted, "launcher"};
  const auto words = pod_command(workload, settings, numbers);
  command.insert(command.end(), words.begin(), words.end());
  container["command"] = command;
  Json set = object_of(
      "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", settings.name,
      settings);
  set["spec"] = {
      {"replicas", 1},
      {"leaderWorkerTemplate",
       {{"size", workload.hosts},
        {"restartPolicy", "RecreateGroupOnPodRestart"},
        {"workerTemplate", pod}}}};
  return set;
}

std::vector<Manifest>
manifests(Engine engine, const Workload& workload, const Settings& settings) {
  std::vector<Manifest> list = companions(workload, settings);
  const auto add = [&](std::vector<Manifest> more) {
    for (auto& one : more) list.push_back(std::move(one));
  };
  if (engine == Engine::kueue) add(kueue_queues(workload, settings));
  if (engine == Engine::kai) add(kai_queues(workload, settings));
  const std::string why = format(
      "The job. After exit code {} it starts again from what it saved, which "
      "does not count; after {} it ends at once.",
      kSaved, join(final_codes(), ", "));
  switch (engine) {
    case Engine::trainer:
      add(trainer_manifests(workload, settings));
      break;
    case Engine::lws:
      list.push_back(
          {"The job. The pods stay when it has ended: delete it then.",
           leader_worker_set(workload, settings)});
      break;
    default:
      if (workload.elastic()) {
        list.push_back(headless_service(settings));
        list.push_back(
            {why + (engine == Engine::kueue
                        ? format(
                              " Its completions and its parallelism, which "
                              "are equal, may be changed while it runs, from "
                              "{} to {}.",
                              workload.fewest_that_fit, workload.hosts)
                        : ""),
             elastic_job(engine, workload, settings)});
      } else {
        list.push_back({why, job_set(engine, workload, settings)});
      }
  }
  return list;
}

}  // namespace

std::string manifest_text(
    Engine engine, const Workload& workload, const Settings& settings) {
  check_manifest(engine, workload, settings);
  std::string text = comment(format(
      "{} on Kubernetes (--to {}): {}. Made by `echelon deploy`.",
      settings.name, to_string(engine), summary(workload)));
  text += comment("Memory of a pod: " + workload.memory_parts);
  text += comment("Time to end: " + workload.grace_parts);
  if (settings.volume.empty()) {
    text += comment(
        workload.remote.empty()
            ? "The run's folder is lost with the pod: see --volume, or "
              "[checkpoint] remote."
            : format(
                  "The run's folder is lost with the pod; the next one resumes "
                  "from what is in {}.",
                  workload.remote));
  }
  for (const auto& secret : needed_secrets(engine, workload, settings)) {
    text += comment("The job needs a secret, which is made once by:");
    text += "#   " + secret.command + "\n";
  }
  bool first = true;
  for (const auto& [why, object] : manifests(engine, workload, settings)) {
    text += first ? "\n" : "---\n";
    first = false;
    text += comment(why) + to_yaml(object);
  }
  return text;
}

SchemaCheck check_schemas(
    Engine engine, const Workload& workload, const Settings& settings) {
  check_manifest(engine, workload, settings);
  SchemaCheck checked;
  std::set<std::string> sources;
  for (const auto& [why, object] : manifests(engine, workload, settings)) {
    const std::string kind = object["kind"];
    sources.insert(schema_source(kind));
    for (const auto& problem : schema_problems(object)) {
      checked.problems.push_back(format(
          "{} {}: {}", kind, object["metadata"]["name"].get<std::string>(),
          problem));
    }
  }
  checked.sources.assign(sources.begin(), sources.end());
  return checked;
}

std::vector<NeededSecret> needed_secrets(
    Engine engine, const Workload& workload, const Settings& settings) {
  std::vector<NeededSecret> needed;
  if (!is_kubernetes(engine)) return needed;
  const std::string in =
      settings.name_space.empty() ? "" : " -n " + settings.name_space;
  // As an argument a secret could be read by all users of this host.
  if (workload.hosts > 1 && settings.token.empty()) {
    const std::string name = settings.name + "-token";
    needed.push_back(
        {name, format(
                   "openssl rand -hex 32 | tr -d '\\n' | kubectl create secret "
                   "generic {}{} --from-file=token=/dev/stdin",
                   name, in)});
  }
  // The keys and the address that this shell has.
  if (workload.object_storage) {
    const std::string name = settings.name + "-storage";
    needed.push_back(
        {name, format(
                   "env | grep ^AWS_ | kubectl create secret generic {}{} "
                   "--from-env-file=/dev/stdin",
                   name, in)});
  }
  return needed;
}

}  // namespace echelon::deploy
