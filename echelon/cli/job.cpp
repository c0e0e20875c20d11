// The launchers of a job answer on their own hosts alone. From elsewhere, a job
// of Slurm is asked by a step that runs this command once more on its node, so
// that Slurm and then the launcher's socket check who asks.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/start_on_hosts.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/launch/control.h"
#include "echelon/launch/guard.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

struct JobRequest {
  std::string run;
  std::string num_ranks;
  bool json = false;
};

// Who wrote to the run's folder last: "process 12 on host n0 of Slurm job 42
// since …". It may have ended.
std::string last_writer(const std::string& run) {
  std::ifstream file(run + "/LOCK");
  std::string line;
  std::getline(file, line);
  const bool plain = std::ranges::all_of(
      line, [](unsigned char c) { return std::isprint(c) != 0; });
  return plain ? line : "";
}

struct SlurmPlace {
  std::string job, node;
};

std::optional<SlurmPlace> slurm_place(const std::string& writer) {
  std::istringstream words(writer);
  SlurmPlace place;
  std::string word;
  for (std::string before; words >> word; before = word) {
    if (before == "host") place.node = word;
    if (before == "job") place.job = word;
  }
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const auto in_name = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '.' || c == '_';
  };
  const bool good = !place.job.empty() && !place.node.empty() &&
                    place.node[0] != '-' &&
                    std::ranges::all_of(place.job, is_digit) &&
                    std::ranges::all_of(place.node, in_name);
  return good ? std::optional(place) : std::nullopt;
}

bool is_here(const SlurmPlace& place) {
  const char* job = std::getenv("SLURM_JOB_ID");
  const char* node = std::getenv("SLURMD_NODENAME");
  return job != nullptr && node != nullptr && place.job == job &&
         place.node == node;
}

[[noreturn]] void ask_by_srun(const SlurmPlace& place) {
  std::cerr << format(
      "echelon: asks on node {} of Slurm job {}, which wrote there last\n",
      place.node, place.job);
  std::vector<std::string> words = {
      "srun",       "--jobid=" + place.job, "--nodelist=" + place.node,
      "--nodes=1",  "--ntasks=1",           "--overlap",
      "--mpi=none", "--export=ALL",         "--quiet"};
  // What this shell's own allocation has asked for, if it is in one.
  std::vector<std::string> others;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (name.starts_with("SLURM_") && name != "SLURM_CONF") {
      others.push_back(name);
    }
  }
  for (const auto& name : others) ::unsetenv(name.c_str());
  const auto own = own_command_line();
  words.insert(words.end(), own.begin(), own.end());
  ::execvp(words[0].c_str(), launch::argv_of(words).data());
  throw ConfigError(
      format("srun, which asks the job on its node: {}", std::strerror(errno)));
}

// How the last job that wrote to `run` is asked, if it still runs; empty: not
// known.
std::string where_to_ask(const std::string& run, const std::string& writer) {
  if (writer.empty()) return "";
  std::istringstream words(writer);
  std::string host;
  for (std::string word, before; words >> word; before = word) {
    if (before == "host") host = word;
  }
  if (host.empty()) host = "HOST";
  return format(
      "the last one was {}, and is asked on its host: `ssh {} echelon job "
      "status {}`, or in a pod `kubectl exec {} -- echelon job status {}`; ",
      writer, host, run, host, run);
}

// What the launcher of the job that writes to `run` answers. Does not return
// where the job is one of Slurm on another host.
std::string ask(const std::string& run, const std::string& request) {
  const std::string name = control_name(run);
  if (name.empty()) throw ConfigError(run + ": there is no such folder");
  const std::string answer = launch::ask_job(name, request);
  if (!answer.empty()) return answer;
  const std::string writer = last_writer(run);
  const auto place = slurm_place(writer);
  if (place && !is_here(*place)) ask_by_srun(*place);
  throw ConfigError(format(
      "{}: no job of yours on this host writes there now; {}`echelon train` "
      "starts one",
      run, where_to_ask(run, writer)));
}

int request(const std::string& run, const std::string& text) {
  const std::string answer = ask(run, text);
  const size_t at = answer.find(": ");
  const std::string rest =
      at == std::string::npos ? answer : answer.substr(at + 2);
  if (answer.starts_with("refused")) throw ConfigError(run + ": " + rest);
  std::cout << run << ": " << rest << "\n";
  return 0;
}

int resize_job(const JobRequest& arguments) {
  const int64_t ranks = parse_count("N", arguments.num_ranks, 1, kMaxRanks);
  return request(arguments.run, format("resize {}", ranks));
}

int checkpoint_job(const JobRequest& arguments) {
  return request(arguments.run, "checkpoint");
}

int stop_job(const JobRequest& arguments) {
  return request(arguments.run, "stop");
}

int drain_host(const JobRequest& arguments) {
  return request(arguments.run, "drain");
}

int show_job(const JobRequest& arguments) {
  const std::filesystem::path run = arguments.run;
  const std::string answer = ask(arguments.run, "status");
  int64_t ranks = 0, generation = 0, hosts = 0;
  std::istringstream numbers(answer);
  std::string word;
  if (!(numbers >> word >> ranks >> word >> generation >> word >> hosts)) {
    return request(arguments.run, "status");  // says why it has none
  }
  const Job job = load_job((run / "config.toml").string());
  nlohmann::ordered_json json = {
      {"run", arguments.run},
      {"ranks", ranks},
      {"hosts", hosts},
      {"layout", to_string(job.layout)},
      {"starts", generation + 1}};
  if (std::filesystem::exists(run / "metrics.jsonl")) {
    const auto metrics = timeline::read_metrics(run / "metrics.jsonl");
    if (!metrics.steps.empty()) {
      json["step"] = metrics.steps.back().step;
      json["loss"] = metrics.steps.back().loss;
    }
  }
  if (arguments.json) {
    print_json(json, std::cout);
    return 0;
  }
  std::cout << format(
      "{}: {}{}, {}{}{}\n", arguments.run,
      hosts > 1 ? counted(hosts, "host") + ", " : "", counted(ranks, "rank"),
      json["layout"].get<std::string>(),
      json.contains("step") ? format(
                                  ", step {}, loss {:.4g}",
                                  format_count(json["step"].get<int64_t>()),
                                  json["loss"].get<double>())
                            : "",
      generation > 0 ? format(", started {}", counted(generation + 1, "time"))
                     : "");
  return 0;
}

}  // namespace

void add_job(Command& root) {
  Command command = root.add(
      "job", "ask a job that runs on this host or under Slurm, or change it",
      "echelon job status runs/first\n"
      "echelon job resize runs/first 3     go on with 3 ranks, in a layout for "
      "them\n"
      "echelon job checkpoint runs/first   save after this step\n"
      "echelon job drain runs/first        this host leaves, and the others go "
      "on\n"
      "echelon job stop runs/first         save, and end with code 75\n"
      "ssh n0 echelon job status runs/first   of --hosts and mpirun: on a host "
      "of the job\n"
      "kubectl exec first-0 -- echelon job status runs/first   of Kubernetes: "
      "in its pod");
  command.require_subcommand();
  const auto add = [&](const char* name, const char* help, const char* example,
                       int (*act)(const JobRequest&)) {
    auto [sub, arguments] = command.add(name, help, example, act);
    sub.positional("RUN", arguments.run, "the run's folder");
    return std::pair<Command, JobRequest&>(sub, arguments);
  };
  auto [status, shown] =
      add("status", "print its ranks, layout and newest step",
          "echelon job status runs/first", show_job);
  status.flag("--json", shown.json, "print it as JSON");
  auto [resize, wanted] =
      add("resize", "go on with another number of ranks",
          "echelon job resize runs/first 3", resize_job);
  resize.positional("N", wanted.num_ranks, "the number of ranks");
  add("checkpoint", "save after this step", "echelon job checkpoint runs/first",
      checkpoint_job);
  add("drain", "this host leaves the job, and the others go on",
      "echelon job drain runs/first", drain_host);
  add("stop", "save, and end with code 75", "echelon job stop runs/first",
      stop_job);
}

}  // namespace echelon::cli
