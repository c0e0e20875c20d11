#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/launch/control.h"
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

// What the launcher of the job that writes to `run` answers.
std::string ask(const std::string& run, const std::string& request) {
  const std::string name = control_name(run);
  if (name.empty()) throw ConfigError(run + ": there is no such folder");
  const std::string answer = launch::ask_job(name, request);
  if (answer.empty()) {
    throw ConfigError(format(
        "{}: no job of yours on this host writes there now; `echelon train` "
        "starts one",
        run));
  }
  return answer;
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
      "job", "ask a job that runs on this host, or change it",
      "echelon job status runs/first\n"
      "echelon job resize runs/first 3     go on with 3 ranks, in a layout for "
      "them\n"
      "echelon job checkpoint runs/first   save after this step\n"
      "echelon job drain runs/first        this host leaves, and the others go "
      "on\n"
      "echelon job stop runs/first         save, and end with code 75");
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
