// One launcher on each node, started by srun as the only step of a batch job.
// sbatch's --signal goes to the step: the launchers save and end with 75, srun
// returns it, and the script asks Slurm for another start of the job. Clusters
// with RequeueExit=75 would do the same, but that is rarely set.
#include <algorithm>

#include "echelon/deploy/engines.h"
#include "echelon/deploy/names.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/units.h"

namespace echelon::deploy {
namespace {

// sbatch takes no earlier signal.
constexpr int64_t kMostSignalSeconds = 65535;

std::string directive(const std::string& name, const std::string& value) {
  return value.empty() ? "" : format("#SBATCH --{}={}\n", name, value);
}

// A job that is told to save as soon as it starts would be queued again and
// again.
void check_time(const Workload& workload, const Settings& settings) {
  if (settings.time_limit.empty()) return;
  const int64_t limit = parse_time_limit("--time", settings.time_limit);
  if (workload.grace_seconds < limit) return;
  throw ConfigError(format(
      "--time {}: the launchers are told to save {} before the time is up: {} "
      "Give more time, or measure a save and give --save-seconds",
      settings.time_limit,
      format_seconds(static_cast<double>(workload.grace_seconds)),
      workload.grace_parts));
}

void check_slurm(const Settings& settings) {
  check_word("--name", settings.name);
  const std::pair<const char*, const std::string&> words[] = {
      {"--account", settings.account},
      {"--partition", settings.partition},
      {"--qos", settings.qos},
      {"--gpu-type", settings.gpu_type},
      {"--image", settings.image}};
  for (const auto& [flag, text] : words) {
    if (!text.empty()) check_word(flag, text);
  }
}

std::string resources(const Workload& workload, const Settings& settings) {
  std::string text;
  // Of a range, Slurm takes the fewest; so a job whose hosts come and go asks
  // for the most, and goes on with fewer when it loses some.
  text += directive("nodes", std::to_string(workload.hosts));
  text += "#SBATCH --ntasks-per-node=1\n";
  text += directive("cpus-per-task", std::to_string(workload.cores_per_host));
  text += comment("Memory of a node: " + workload.memory_parts);
  text += directive("mem", memory_text(workload.memory_bytes, true));
  if (workload.gpus) {
    text += directive(
        "gres", format(
                    "gpu:{}{}",
                    settings.gpu_type.empty() ? "" : settings.gpu_type + ":",
                    workload.ranks_per_host));
  }
  text += directive("account", settings.account);
  text += directive("qos", settings.qos);
  text += directive("partition", settings.partition);
  return text;
}

std::string life(const Workload& workload, const Settings& settings) {
  std::string text = comment(
      "Slurm may start the job again: when another job takes its nodes, when a "
      "node fails, and when this script asks for it.");
  text += "#SBATCH --requeue\n#SBATCH --open-mode=append\n";
  if (workload.elastic()) {
    text += comment("The job keeps its other nodes when one fails.");
    text += "#SBATCH --no-kill\n";
  }
  if (!settings.time_limit.empty()) {
    text += directive("time", settings.time_limit);
    text += comment(format(
        "The launchers are told to save {} before the time is up: {}",
        format_seconds(static_cast<double>(workload.grace_seconds)),
        workload.grace_parts));
    text += format(
        "#SBATCH --signal=TERM@{}\n",
        std::min(workload.grace_seconds, kMostSignalSeconds));
  }
  return text;
}

// The step, as a line that breaks before each option of srun.
std::string step(const Workload& workload, const Settings& settings) {
  const bool many = workload.hosts > 1;
  std::string text = "srun";
  if (many) {
    text += " --nodes=\"$nodes\" --ntasks=\"$nodes\" --ntasks-per-node=1";
  } else {
    text += " --ntasks=1";
  }
  text += format(
      " --cpus-per-task={} --kill-on-bad-exit=0", workload.cores_per_host);
  if (!settings.image.empty()) {
    text += format(
        " \\\n  --container-image={} --container-mounts=\"$PWD:$PWD\" "
        "--container-workdir=\"$PWD\"",
        shell_word(settings.image));
  }
  const auto words = train_command(workload, workload.file, "", "");
  if (!many) {
    return text + " \\\n  " +
           join(words, " ", [](const auto& word) { return shell_word(word); });
  }
  // The number of a host is known to the step alone. The words are those of
  // train_command() without the values of its last two options.
  std::string command;
  for (size_t i = 0; i + 4 < words.size(); ++i) {
    command += shell_word(words[i]) + " ";
  }
  return text +
         " \\\n  bash -c 'exec \"$@\" --node-rank \"$SLURM_NODEID\"' "
         "launcher \\\n  " +
         command + "--master-addr \"$master\"";
}

constexpr const char* kEnd = R"(
case $code in
  75) # The state is saved: the job queues again and goes on from there.
    scontrol requeue "$SLURM_JOB_ID" ;;
  93) # Starting again would not help: the job is kept for you to look at.
    scontrol requeuehold "$SLURM_JOB_ID" ;;
esac
exit "$code"
)";

}  // namespace

std::string slurm_script(const Workload& workload, const Settings& settings) {
  check_slurm(settings);
  check_time(workload, settings);
  std::string text = "#!/bin/bash\n";
  text += comment(format(
      "{} under Slurm: {}. Made by `echelon deploy`.", settings.name,
      summary(workload)));
  text += directive("job-name", settings.name);
  text += directive("output", settings.name + "-%j.log");
  text += resources(workload, settings);
  text += life(workload, settings);
  text += "\n";
  if (!settings.volume.empty()) {
    text += comment("The folder that all nodes share.");
    text += format("cd {} || exit 2\n", shell_word(settings.volume));
  }
  if (!settings.image.empty()) {
    text += comment("srun starts containers where Slurm has pyxis.");
  }
  if (workload.hosts == 1) {
    text += step(workload, settings) + "\ncode=$?\n";
    return text + kEnd;
  }
  text += comment(
      "The launchers prove to each other that they have this secret; srun "
      "takes it along.");
  text +=
      "ECHELON_TOKEN=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')\n"
      "export ECHELON_TOKEN\n";
  if (!workload.elastic()) {
    text += "nodes=$SLURM_JOB_NUM_NODES\n";
    text +=
        "master=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | "
        "head -n 1)\n";
    text += step(workload, settings) + "\ncode=$?\n";
    return text + kEnd;
  }
  text += comment(
      "When a node fails, Slurm ends the step, and another one goes on with "
      "the nodes that are left, from the newest checkpoint.");
  text += format(
      "while true; do\n"
      "  nodes=$(squeue -h -j \"$SLURM_JOB_ID\" -o %D)\n"
      "  list=$(squeue -h -j \"$SLURM_JOB_ID\" -o %N)\n"
      "  master=$(scontrol show hostnames \"$list\" | head -n 1)\n"
      "  {}\n"
      "  code=$?\n"
      "  left=$(squeue -h -j \"$SLURM_JOB_ID\" -o %D)\n"
      "  [ \"$code\" -gt 128 ] && [ \"$left\" -lt \"$nodes\" ] || break\n"
      "  [ \"$left\" -ge {} ] || {{ code=75; break; }}\n"
      "done\n",
      step(workload, settings), workload.least_hosts);
  return text + kEnd;
}

}  // namespace echelon::deploy
