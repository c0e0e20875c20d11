// Where no engine starts the hosts: a shell script over ssh, and a driver for
// Ray.
#include <nlohmann/json.hpp>

#include "echelon/deploy/engines.h"
#include "echelon/deploy/names.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"

namespace echelon::deploy {
namespace {

std::string shell_words(const std::vector<std::string>& words) {
  return join(words, " ", [](const auto& word) { return shell_word(word); });
}

// The command up to --nnodes HOSTS; what follows it differs on each host.
std::vector<std::string> common_words(const Workload& workload) {
  auto words = train_command(workload, workload.file, "", "");
  if (workload.hosts > 1) words.resize(words.size() - 4);
  return words;
}

// Strings of JSON, and lists of them, are those of Python.
std::string python_text(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string ssh_script(const Workload& workload, const Settings& settings) {
  if (settings.nodes.empty()) {
    throw ConfigError(
        "--hosts is missing: where the job runs, as in --hosts node-a,node-b");
  }
  for (const auto& node : settings.nodes) check_word("--hosts", node);
  if (static_cast<int64_t>(settings.nodes.size()) != workload.hosts) {
    throw ConfigError(format(
        "--nnodes {}, but --hosts names {}: give as many", hosts_text(workload),
        settings.nodes.size()));
  }
  const std::string folder =
      settings.volume.empty() ? "\"$PWD\"" : shell_word(settings.volume);
  std::string text = "#!/bin/bash\n";
  text += comment(format(
      "{} over ssh: {}. Made by `echelon deploy`.", settings.name,
      summary(workload)));
  text += "set -u\n";
  text += format("hosts=({})\n", shell_words(settings.nodes));
  text += comment("The same folder on every host.");
  text += format("folder={}\n", folder);
  text += comment(
      "The launchers prove to each other that they have this secret. It goes "
      "through standard input, because all users of a host can read "
      "arguments.");
  text += "token=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')\n\n";
  text += "start() {  # NUMBER\n";
  text += "  local line\n";
  text +=
      format("  line=$(printf '%q ' {}", shell_words(common_words(workload)));
  if (workload.hosts > 1) {
    text += " \\\n    --node-rank \"$1\" --master-addr \"${hosts[0]}\"";
  }
  text += ")\n";
  text +=
      "  {\n"
      "    printf 'export ECHELON_TOKEN=%s\\n' \"$token\"\n"
      "    printf 'cd %q || exit 2\\n' \"$folder\"\n"
      "    printf 'exec %s\\n' \"$line\"\n"
      "  } | ssh -o BatchMode=yes \"${hosts[$1]}\" bash -s &\n"
      "  processes+=($!)\n"
      "}\n\n";
  text += comment("A signal to this script ends the job once it has saved.");
  text += format(
      "stop() {{\n"
      "  stopped=yes\n"
      "  ssh -o BatchMode=yes \"${{hosts[0]}}\" \\\n"
      "    \"$(printf 'cd %q && echelon job stop %q' \"$folder\" {})\"\n"
      "}}\n"
      "trap stop INT TERM\n\n",
      shell_word(workload.run));
  text +=
      "processes=()\n"
      "for number in \"${!hosts[@]}\"; do start \"$number\"; done\n"
      "code=0\n"
      "for process in \"${processes[@]}\"; do\n"
      // A signal ends `wait` early.
      "  stopped=yes\n"
      "  while [ -n \"$stopped\" ]; do stopped=; wait \"$process\"; one=$?; "
      "done\n"
      "  [ \"$code\" -ne 0 ] || code=$one\n"
      "done\n";
  text += comment("75: the job has saved, and this script goes on from there.");
  return text + "exit \"$code\"\n";
}

std::string ray_driver(const Workload& workload, const Settings& settings) {
  std::string bundle = format("\"CPU\": {}", workload.cores_per_host);
  if (workload.gpus) {
    bundle += format(", \"GPU\": {}", workload.ranks_per_host);
  }
  bundle += format(", \"memory\": {}", workload.memory_bytes);
  const std::string folder =
      settings.volume.empty() ? "os.getcwd()" : python_text(settings.volume);
  std::string text = "#!/usr/bin/env python3\n";
  text += comment(format(
      "{} on Ray: {}. Made by `echelon deploy`.", settings.name,
      summary(workload)));
  text += comment(
      "Ray keeps the hosts' devices for the job and starts a launcher on each; "
      "the launchers do the rest. The secret that they prove to each other is "
      "seen by whoever may talk to Ray, which has no authentication of its "
      "own.");
  text += format(
      "import os\n"
      "import secrets\n"
      "import subprocess\n"
      "import sys\n"
      "\n"
      "import ray\n"
      "from ray.util.placement_group import placement_group\n"
      "from ray.util.scheduling_strategies import "
      "PlacementGroupSchedulingStrategy\n"
      "\n"
      "HOSTS = {}\n"
      "DEVICES = {{{}}}  # of each host\n"
      "FOLDER = {}  # the same on every host\n"
      "COMMAND = {}\n",
      workload.hosts, bundle, folder, python_text(common_words(workload)));
  text += R"(

@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def launch(number, master, token):
    command = list(COMMAND)
    if HOSTS > 1:
        command += ["--node-rank", str(number), "--master-addr", master]
    environment = dict(os.environ, ECHELON_TOKEN=token)
    return subprocess.run(command, cwd=FOLDER, env=environment).returncode


def main():
    ray.init(address="auto")
    group = placement_group([DEVICES] * HOSTS, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(number, **resources):
        place = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number)
        return {"scheduling_strategy": place, **resources}

    master = ray.get(address.options(**on(0, num_cpus=0)).remote())
    token = secrets.token_hex(32)
    started = [
        launch.options(**on(
            number, num_cpus=DEVICES["CPU"],
            num_gpus=DEVICES.get("GPU", 0))).remote(number, master, token)
        for number in range(HOSTS)]
    codes = ray.get(started)
    sys.exit(next((code for code in codes if code != 0), 0))


main()
)";
  return text;
}

}  // namespace echelon::deploy
