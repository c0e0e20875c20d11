#include "echelon/deploy/deploy.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "echelon/deploy/engines.h"
#include "echelon/deploy/names.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/plain.h"
#include "echelon/text/units.h"

namespace echelon::deploy {
namespace {

// An option, and the engines that take it.
struct Taken {
  const char* flag;
  bool given;
  std::vector<Engine> by;
};

const std::vector<Engine> kManifests = {
    Engine::jobset, Engine::kueue, Engine::kai, Engine::trainer, Engine::lws};

std::vector<Taken>
options_of(const Workload& workload, const Settings& settings) {
  std::vector<Engine> images = kManifests;
  images.push_back(Engine::slurm);
  const std::vector<Engine> slurm = {Engine::slurm};
  const std::vector<Engine> queues = {Engine::kueue, Engine::kai};
  return {
      {"--account", !settings.account.empty(), slurm},
      {"--partition", !settings.partition.empty(), slurm},
      {"--qos", !settings.qos.empty(), slurm},
      {"--time", !settings.time_limit.empty(), slurm},
      {"--gpu-type", !settings.gpu_type.empty(), slurm},
      {"--image", !settings.image.empty(), images},
      {"--namespace", !settings.name_space.empty(), kManifests},
      {"--new-token", !settings.token.empty(), kManifests},
      {"--topology", !settings.topology.empty(), kManifests},
      {"--metrics-port", settings.metrics_port > 0, kManifests},
      {"--queue", !settings.queue.empty(), queues},
      {"--pool", !settings.projects.empty(), queues},
      {"--hosts", !settings.nodes.empty(), {Engine::ssh}},
      {"--nnodes MIN:MAX",
       workload.elastic(),
       {Engine::slurm, Engine::kueue, Engine::kai, Engine::ssh}}};
}

void check_options(
    Engine engine, const Workload& workload, const Settings& settings) {
  for (const auto& [flag, given, by] : options_of(workload, settings)) {
    if (!given || std::ranges::find(by, engine) != by.end()) continue;
    throw ConfigError(format(
        "{}: --to {} has nothing for it; --to {} {}", flag, to_string(engine),
        join(by, ", ", [](Engine one) { return to_string(one); }),
        by.size() == 1 ? "does" : "do"));
  }
}

// The queue of the job is a project that takes jobs: no part of it is another
// project.
void check_queue(const Settings& settings) {
  std::vector<std::string> leaves;
  for (const Project& one : settings.projects) {
    check_object_name("--pool: [project." + one.name + "]", one.name, false);
    if (std::ranges::none_of(settings.projects, [&](const Project& other) {
          return other.parent == one.name;
        })) {
      leaves.push_back(one.name);
    }
  }
  if (std::ranges::find(leaves, settings.queue) != leaves.end()) return;
  throw ConfigError(format(
      "--queue {}: is no project of --pool that takes jobs, which are {}{}",
      settings.queue, join(leaves, ", "),
      config::did_you_mean(settings.queue, leaves)));
}

}  // namespace

const std::vector<std::string>& engine_names() {
  static const std::vector<std::string> names = {
      "slurm", "jobset", "kueue", "kai", "trainer", "lws", "ray", "ssh"};
  return names;
}

Engine engine_from_name(const std::string& name) {
  const auto& names = engine_names();
  const auto at = std::ranges::find(names, name);
  if (at == names.end()) {
    throw ConfigError(format(
        "--to {}: must be one of {}{}", name, join(names, ", "),
        config::did_you_mean(name, names)));
  }
  return static_cast<Engine>(at - names.begin());
}

std::string to_string(Engine engine) {
  return engine_names()[static_cast<size_t>(engine)];
}

bool is_kubernetes(Engine engine) {
  return std::ranges::find(kManifests, engine) != kManifests.end();
}

std::string name_of(const std::string& file) {
  std::string name;
  for (const char c : std::filesystem::path(file).stem().string()) {
    if (c >= 'A' && c <= 'Z') {
      name += static_cast<char>(c - 'A' + 'a');
    } else if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) {
      name += c;
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  if (name.empty()) return "job";
  return name[0] >= 'a' ? name : "job-" + name;
}

std::vector<std::string> train_command(
    const Workload& workload, const std::string& file, const std::string& host,
    const std::string& master) {
  std::vector<std::string> words = {"echelon", "train", file};
  words.insert(words.end(), workload.options.begin(), workload.options.end());
  words.insert(words.end(), {"-n", std::to_string(workload.ranks_per_host)});
  if (workload.max_restarts != 3) {
    words.insert(
        words.end(), {"--max-restarts", std::to_string(workload.max_restarts)});
  }
  if (workload.hosts > 1) {
    words.insert(
        words.end(), {"--nnodes", hosts_text(workload), "--node-rank", host,
                      "--master-addr", master});
  }
  return words;
}

std::string hosts_text(const Workload& workload) {
  return workload.elastic()
             ? format("{}:{}", workload.least_hosts, workload.hosts)
             : std::to_string(workload.hosts);
}

std::string summary(const Workload& workload) {
  return format(
      "{} of {}, layout {}",
      workload.elastic()
          ? format("{} to {} hosts", workload.least_hosts, workload.hosts)
          : counted(workload.hosts, "host"),
      counted(workload.ranks_per_host, "rank"), workload.layout);
}

std::string comment(const std::string& text) {
  constexpr size_t kColumns = 80;
  std::string lines, line = "#";
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (line.size() + 1 + word.size() > kColumns && line.size() > 1) {
      lines += line + "\n";
      line = "#";
    }
    line += " " + word;
  }
  return lines + line + "\n";
}

std::string memory_text(int64_t bytes, bool slurm) {
  const auto up = [&](int shift) { return ((bytes - 1) >> shift) + 1; };
  const bool large = bytes >= (int64_t{2} << 30);
  return format(
      "{}{}{}", large ? up(30) : up(20), large ? "G" : "M", slurm ? "" : "i");
}

std::string
deployment(Engine engine, const Workload& workload, const Settings& settings) {
  check_options(engine, workload, settings);
  if (!settings.projects.empty()) check_queue(settings);
  switch (engine) {
    case Engine::slurm:
      return slurm_script(workload, settings);
    case Engine::ssh:
      return ssh_script(workload, settings);
    case Engine::ray:
      return ray_driver(workload, settings);
    default:
      return manifest_text(engine, workload, settings);
  }
}

std::string
send_command(Engine engine, const Settings& settings, const std::string& file) {
  switch (engine) {
    case Engine::slurm:
      return "sbatch " + shell_word(file);
    case Engine::ssh:
      return "bash " + shell_word(file);
    case Engine::ray:
      return "python3 " + shell_word(file);
    default:
      return format(
          "kubectl create{} -f {}",
          settings.name_space.empty() ? "" : " -n " + settings.name_space,
          shell_word(file));
  }
}

std::string
ask_command(Engine engine, const Workload& workload, const Settings& settings) {
  std::string command = "echelon job status " + shell_word(workload.run);
  if (!is_kubernetes(engine)) return command;
  command += format(
      " --pod {}",
      engine == Engine::lws       ? settings.name + "-0"
      : engine == Engine::trainer ? format("job/{}-node-0", settings.name)
      : workload.elastic()        ? "job/" + settings.name
                                  : format("job/{}-hosts-0", settings.name));
  if (settings.name_space.empty()) return command;
  return command + " --namespace " + settings.name_space;
}

}  // namespace echelon::deploy
