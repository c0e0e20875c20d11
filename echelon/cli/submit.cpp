// Sends a job by the engine's own program, and follows it by asking that
// program again. The job does not need this process.
#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "echelon/cli/deployed.h"
#include "echelon/cli/programs.h"
#include "echelon/error.h"
#include "echelon/launch/scratch.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::cli {
namespace {

struct SubmitArguments : DeployArguments {
  bool no_follow = false;
  std::string every = "5";
};

constexpr auto kMostWait = std::chrono::minutes(1);
// Questions in a row without an answer: a controller that starts again has not
// ended the job.
constexpr int kMostFailures = 12;

std::string trimmed(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

std::string needed(const std::string& program) {
  const std::string path = in_path(program);
  if (!path.empty()) return path;
  throw ConfigError(format(
      "echelon submit: there is no {} on PATH; `echelon deploy` writes the job "
      "without it, to be sent from elsewhere",
      program));
}

// What a program of the engine prints. Throws with what it says when it fails.
std::string asked(const std::vector<std::string>& command) {
  const Captured answer = capture(command, kMostWait);
  if (answer.exit_code == 0) return trimmed(answer.out);
  const std::string name = std::filesystem::path(command[0]).filename();
  throw ConfigError(
      answer.timed_out
          ? format("{}: no answer within a minute", name)
          : format("{}: {}", name, trimmed(answer.err + answer.out)));
}

// A state as the engine calls it, and the exit code of a job that has ended.
struct State {
  std::string text;
  bool ended = false;
  int exit_code = 0;
};

// Asks until the job has ended, and prints each new state. Throws when there is
// no answer several times in a row.
template <typename Ask>
int follow(const std::string& job, int64_t seconds, const Ask& ask) {
  std::string last;
  int failures = 0;
  while (true) {
    State state;
    try {
      state = ask();
      failures = 0;
    } catch (const ConfigError& error) {
      if (++failures == kMostFailures) throw;
      state.text = format("no answer, is asked again ({})", error.what());
    }
    if (state.text != last) std::cout << job << ": " << state.text << std::endl;
    last = state.text;
    if (state.ended) return state.exit_code;
    std::this_thread::sleep_for(std::chrono::seconds(seconds));
  }
}

// "JobState=RUNNING Reason=None …", "ExitCode=75:0": the value of a name.
std::string value_of(const std::string& text, const std::string& name) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (word.starts_with(name + "=")) return word.substr(name.size() + 1);
  }
  return "";
}

State slurm_state(const std::string& scontrol, const std::string& id) {
  const std::string text = asked({scontrol, "show", "job", "-o", id});
  State state{.text = value_of(text, "JobState")};
  for (const char* going :
       {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED",
        "REQUEUED", "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT",
        "STOPPED", "PREEMPTED"}) {
    if (state.text != going) continue;
    const std::string reason = value_of(text, "Reason");
    if (state.text == "PENDING" && !reason.empty()) {
      // A job that was held waits for its user.
      state.text += format(" ({})", reason);
      if (reason.starts_with("JobHeld") ||
          reason == "job_requeued_in_held_state") {
        state.ended = true;
        state.exit_code = static_cast<int>(ExitCode::do_not_requeue);
      }
    }
    return state;
  }
  state.ended = true;
  if (state.text == "SPECIAL_EXIT") {
    state.exit_code = static_cast<int>(ExitCode::do_not_requeue);
  } else if (state.text != "COMPLETED") {
    const int code = std::atoi(value_of(text, "ExitCode").c_str());
    state.exit_code = code != 0 ? code : static_cast<int>(ExitCode::failure);
  }
  return state;
}

void say_how_to_ask(const Deployed& made) {
  std::cout << format(
                   "while it runs: {}\n",
                   deploy::ask_command(
                       made.engine, made.workload, made.settings))
            << std::flush;
}

int submit_to_slurm(
    const SubmitArguments& arguments, const Deployed& made,
    const std::string& file, int64_t every) {
  const std::string sbatch = needed("sbatch");
  const std::string answer = asked({sbatch, "--parsable", file});
  const std::string id = answer.substr(0, answer.find(';'));
  std::cout << format("job {}\n", id) << std::flush;
  say_how_to_ask(made);
  if (arguments.no_follow) return 0;
  const std::string scontrol = needed("scontrol");
  return follow("job " + id, every, [&] { return slurm_state(scontrol, id); });
}

// The last condition that holds, of a JobSet, a Job or a TrainJob.
State condition_of(const std::string& text) {
  State state{.text = "waits"};
  const auto object = nlohmann::json::parse(text, nullptr, false);
  if (object.is_discarded()) return state;
  const auto status = object.value("status", nlohmann::json::object());
  if (status.value("active", 0) > 0) state.text = "runs";
  for (const auto& jobs :
       status.value("replicatedJobsStatus", nlohmann::json::array())) {
    if (jobs.value("active", 0) > 0) state.text = "runs";
  }
  for (const auto& one : status.value("conditions", nlohmann::json::array())) {
    if (one.value("status", "") != "True") continue;
    const std::string type = one.value("type", "");
    if (type == "Failed") {
      const std::string why = one.value("message", "");
      return {
          .text = why.empty() ? type : type + ": " + why,
          .ended = true,
          .exit_code = static_cast<int>(ExitCode::failure)};
    }
    if (type == "Complete" || type == "Completed") {
      return {.text = type, .ended = true};
    }
    if (type == "Suspended") state.text = "Suspended: it waits in its queue";
  }
  return state;
}

int submit_to_kubernetes(
    const SubmitArguments& arguments, const Deployed& made,
    const std::string& file, int64_t every) {
  const std::string kubectl = needed("kubectl");
  std::vector<std::string> place;
  if (!made.settings.name_space.empty()) {
    place = {"-n", made.settings.name_space};
  }
  for (const auto& secret :
       deploy::needed_secrets(made.engine, made.workload, made.settings)) {
    std::vector<std::string> look = {kubectl, "get", "secret", secret.name};
    look.insert(look.end(), place.begin(), place.end());
    if (capture(look, kMostWait).exit_code == 0) continue;
    const bool token = secret.name.ends_with("-token");
    throw ConfigError(format(
        "the job's secret {} is not there; {}make it: {}", secret.name,
        token ? "give --new-token, or " : "", secret.command));
  }
  std::vector<std::string> create = {kubectl, "create", "-o", "name"};
  create.insert(create.end(), place.begin(), place.end());
  create.insert(create.end(), {"-f", file});
  const std::string names = asked(create);
  std::cout << names << "\n" << std::flush;
  say_how_to_ask(made);
  if (arguments.no_follow) return 0;
  if (made.engine == deploy::Engine::lws) {
    std::cout << "a LeaderWorkerSet does not say when its job has ended; see "
                 "`kubectl logs`\n";
    return 0;
  }
  // The job is the last object of the manifests.
  const size_t line = names.rfind('\n');
  const std::string job =
      line == std::string::npos ? names : names.substr(line + 1);
  std::vector<std::string> get = {kubectl, "get", job, "-o", "json"};
  get.insert(get.end(), place.begin(), place.end());
  return follow(job, every, [&] { return condition_of(asked(get)); });
}

int submit_job(const SubmitArguments& arguments) {
  const int64_t every = parse_count("--every", arguments.every, 0, 3600);
  const Deployed made = deployed(arguments);
  if (made.engine == deploy::Engine::ray ||
      made.engine == deploy::Engine::ssh) {
    throw ConfigError(format(
        "echelon submit: --to {} has no queue to send to; write the job with "
        "`echelon deploy … --output FILE` and start it: {}",
        deploy::to_string(made.engine),
        deploy::send_command(made.engine, made.settings, "FILE")));
  }
  const launch::ScratchFolder folder;
  const std::string file = folder.path() + "/" + made.settings.name;
  write_file_atomically(file, made.text);
  return made.engine == deploy::Engine::slurm
             ? submit_to_slurm(arguments, made, file, every)
             : submit_to_kubernetes(arguments, made, file, every);
}

}  // namespace

void add_submit(Command& root) {
  auto [command, arguments] = root.add(
      "submit", "send a job to Slurm or Kubernetes, and follow it",
      "echelon submit --to slurm first.toml -n 8 --nnodes 2 --time 12:00:00\n"
      "echelon submit --to jobset first.toml -n 8 --image my/echelon\n"
      "echelon submit --to slurm first.toml -n 8 --no-follow   send it, and "
      "end",
      submit_job);
  add_deploy_arguments(command, arguments);
  command.flag(
      "--no-follow", arguments.no_follow,
      "end when it is sent; the job runs on in any case");
  command.option(
      "--every", arguments.every, "SECONDS",
      "time between two questions about its state (default: 5)");
}

}  // namespace echelon::cli
