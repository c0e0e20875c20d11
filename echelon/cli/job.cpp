// The launchers of a job answer on their own hosts alone. From elsewhere this
// command runs once more where the job is: in a step of a job of Slurm, by ssh,
// or in a pod. So Slurm, ssh or Kubernetes checks who asks, and then the
// launcher's socket. The LOCK of the run's folder says where the job is, or
// --host and --pod do.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
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
#include "echelon/cli/deployed.h"
#include "echelon/cli/job_hosts.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/start_on_hosts.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/launch/control.h"
#include "echelon/launch/guard.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"
#include "echelon/text/units.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

struct JobRequest {
  std::string run;
  std::string num_ranks;
  bool json = false;
  std::string host, pod, name_space;
  std::string ssh = HostArguments().ssh;
};

// Set where this command runs for another one, which asks no further.
constexpr const char* kAsked = "ECHELON_ASKED";
// As long as a launcher may take, and a little more.
constexpr std::chrono::minutes kMostWait{11};
constexpr int kSshFailed = 255;

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

// The word after `before` in what last_writer() says, when it could be a name
// of a host, a job or a pod.
std::string named_after(const std::string& writer, const std::string& before) {
  std::istringstream words(writer);
  std::string last;
  for (std::string word; words >> word; last = word) {
    const auto in_name = [](unsigned char c) {
      return std::isalnum(c) != 0 || std::strchr("-._/", c) != nullptr;
    };
    if (last == before && word[0] != '-' &&
        std::ranges::all_of(word, in_name)) {
      return word;
    }
  }
  return "";
}

struct SlurmPlace {
  std::string job, node;
};

std::optional<SlurmPlace> slurm_place(const std::string& writer) {
  const SlurmPlace place{
      named_after(writer, "job"), named_after(writer, "host")};
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const bool good = !place.job.empty() && !place.node.empty() &&
                    std::ranges::all_of(place.job, is_digit);
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

// This command's words, for another place.
std::vector<std::string> words_there() {
  return command_with(
      own_command_line(), "job", {"--host", "--pod", "--namespace", "--ssh"},
      {});
}

// Shows what a command has printed, and ends with its code.
[[noreturn]] void end_with(const Captured& answer) {
  std::cout << answer.out << std::flush;
  std::cerr << answer.err << std::flush;
  std::exit(
      answer.timed_out ? static_cast<int>(ExitCode::failure)
                       : answer.exit_code);
}

std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.empty() ? "it said nothing" : text.substr(text.rfind('\n') + 1);
}

// Returns why there was no answer; ends this process with the answer.
std::string ask_by_ssh(const JobRequest& asked, const std::string& host) {
  std::vector<std::string> words;
  std::istringstream text(asked.ssh);
  for (std::string word; text >> word;) words.push_back(word);
  if (words.empty()) throw ConfigError("--ssh \"\": names no program");
  std::string line = format("{}=1; export {}; ", kAsked, kAsked);
  // A path that is relative begins in this folder, there too.
  if (!std::filesystem::path(asked.run).is_absolute()) {
    line += format(
        "cd {} && ", shell_word(std::filesystem::current_path().string()));
  }
  line += "exec";
  for (const auto& word : words_there()) line += " " + shell_word(word);
  words.insert(words.end(), {host, "exec sh -c " + shell_word(line)});
  const std::string program =
      words[0].find('/') == std::string::npos ? in_path(words[0]) : words[0];
  if (program.empty()) return format("there is no {} on PATH", words[0]);
  words[0] = program;
  const Captured answer = capture(words, kMostWait);
  if (answer.exit_code != kSshFailed) end_with(answer);
  return format("`{} {}` failed: {}", asked.ssh, host, last_line(answer.err));
}

// The same in a pod, "POD" or "job/NAME" (any pod of it answers), where the
// run's folder may have another path.
std::string ask_in_pod(
    const JobRequest& asked, const std::string& name_space,
    const std::string& pod, const std::string& run) {
  const std::string kubectl = in_path("kubectl");
  if (kubectl.empty()) return "there is no kubectl on PATH";
  std::vector<std::string> words = {kubectl, "exec"};
  if (!name_space.empty()) {
    words.insert(words.end(), {"--namespace", name_space});
  }
  words.insert(words.end(), {pod, "--", "env", format("{}=1", kAsked)});
  auto there = words_there();
  there[0] = "echelon";
  std::ranges::replace(there, asked.run, run);
  words.insert(words.end(), there.begin(), there.end());
  const Captured answer = capture(words, kMostWait);
  for (const char* of_kubectl :
       {"Error from server", "error:", "Unable to connect"}) {
    if (answer.exit_code != 0 && answer.err.starts_with(of_kubectl)) {
      return last_line(answer.err);
    }
  }
  end_with(answer);
}

// The run's folder as the job has it, whose configuration says it.
std::string run_of_job(const std::string& run) {
  try {
    return load_job(run + "/config.toml").train.run;
  } catch (const Error&) {
    return run;
  }
}

// Asks the job that wrote to the run's folder last, if that was elsewhere.
// Returns how it is asked otherwise, and why it was not; empty: nobody has
// written there, or it was here.
std::string ask_writer(const JobRequest& asked, const std::string& writer) {
  const std::string host = named_after(writer, "host");
  if (host.empty() || std::getenv(kAsked) != nullptr) return "";
  const std::string other = format("the last one was {}, ", writer);
  if (const std::string pod = named_after(writer, "pod"); !pod.empty()) {
    const char* own = std::getenv("POD_NAME");
    const size_t slash = pod.find('/');
    if (slash == std::string::npos) return "";
    const std::string name = pod.substr(slash + 1);
    if (own != nullptr && own == name) return other;
    const std::string run = run_of_job(asked.run);
    std::cerr << format(
        "echelon: asks in pod {}, which wrote there last\n", pod);
    const std::string why = ask_in_pod(asked, pod.substr(0, slash), name, run);
    return other + format(
                       "and is asked by `kubectl exec --namespace {} {} -- "
                       "echelon job status {}`, but {}; ",
                       pod.substr(0, slash), name, run, why);
  }
  char here[256] = "";
  ::gethostname(here, sizeof(here) - 1);
  if (host == here) return other;
  std::cerr << format(
      "echelon: asks on host {} by ssh, which wrote there last\n", host);
  const std::string why = ask_by_ssh(asked, host);
  return other + format(
                     "and is asked by `ssh {} echelon job status {}`, but {}; "
                     "--host gives it another name; ",
                     host, asked.run, why);
}

// What the launcher of the job that writes to the run's folder answers. Does
// not return where another place has answered.
std::string ask(const JobRequest& asked, const std::string& request) {
  const std::string& run = asked.run;
  if (!asked.host.empty() && !asked.pod.empty()) {
    throw ConfigError("--host and --pod: a job is in one place; give one");
  }
  if (!asked.host.empty()) {
    check_host_name("--host " + asked.host, asked.host);
    throw ConfigError(format("{}: {}", run, ask_by_ssh(asked, asked.host)));
  }
  if (!asked.pod.empty()) {
    const bool good = asked.pod[0] != '-' && asked.name_space[0] != '-';
    if (!good) throw ConfigError("--pod and --namespace: are names");
    throw ConfigError(format(
        "--pod {}: {}", asked.pod,
        ask_in_pod(asked, asked.name_space, asked.pod, run)));
  }
  if (!asked.name_space.empty()) {
    throw ConfigError("--namespace: is that of --pod; give both");
  }
  const std::string name = control_name(run);
  if (name.empty()) {
    throw ConfigError(format(
        "{}: there is no such folder; --host HOST asks on a host that has it, "
        "and --pod POD in a pod",
        run));
  }
  const std::string answer = launch::ask_job(name, request);
  if (!answer.empty()) return answer;
  const std::string writer = last_writer(run);
  const auto place = slurm_place(writer);
  if (place && !is_here(*place)) ask_by_srun(*place);
  throw ConfigError(format(
      "{}: no job of yours on this host writes there now; {}`echelon train` "
      "starts one",
      run, place ? "" : ask_writer(asked, writer)));
}

int request(const JobRequest& asked, const std::string& text) {
  const std::string& run = asked.run;
  const std::string answer = ask(asked, text);
  const size_t at = answer.find(": ");
  const std::string rest =
      at == std::string::npos ? answer : answer.substr(at + 2);
  if (answer.starts_with("refused")) throw ConfigError(run + ": " + rest);
  std::cout << run << ": " << rest << "\n";
  return 0;
}

int resize_job(const JobRequest& arguments) {
  const int64_t ranks = parse_count("N", arguments.num_ranks, 1, kMaxRanks);
  return request(arguments, format("resize {}", ranks));
}

int checkpoint_job(const JobRequest& arguments) {
  return request(arguments, "checkpoint");
}

int stop_job(const JobRequest& arguments) {
  return request(arguments, "stop");
}

int drain_host(const JobRequest& arguments) {
  return request(arguments, "drain");
}

int show_job(const JobRequest& arguments) {
  const std::filesystem::path run = arguments.run;
  const std::string answer = ask(arguments, "status");
  int64_t ranks = 0, generation = 0, hosts = 0;
  std::istringstream numbers(answer);
  std::string word;
  if (!(numbers >> word >> ranks >> word >> generation >> word >> hosts)) {
    return request(arguments, "status");  // says why it has none
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
      "job", "ask a job that runs, or change it",
      "echelon job status runs/first\n"
      "echelon job resize runs/first 3     go on with 3 ranks, in a layout for "
      "them\n"
      "echelon job checkpoint runs/first   save after this step\n"
      "echelon job drain runs/first        this host leaves, and the others go "
      "on\n"
      "echelon job stop runs/first         save, and end with code 75\n"
      "echelon job stop runs/first --host n0    by ssh, on a host of the job\n"
      "echelon job stop runs/first --pod first-0    by kubectl, in a pod of "
      "it");
  command.require_subcommand();
  const auto add = [&](const char* name, const char* help, const char* example,
                       int (*act)(const JobRequest&)) {
    auto [sub, arguments] = command.add(name, help, example, act);
    sub.positional("RUN", arguments.run, "the run's folder");
    sub.option(
        "--host", arguments.host, "HOST",
        "ask on this host by ssh, where the folder has the same path (default: "
        "where the folder says that its job is)");
    sub.option(
        "--ssh", arguments.ssh, "COMMAND",
        "what logs in to a host (default: ssh -o BatchMode=yes)");
    sub.option(
        "--pod", arguments.pod, "POD|job/NAME",
        "ask in this pod by kubectl; RUN is the folder's path there");
    sub.option(
        "--namespace", arguments.name_space, "NAME",
        "the namespace of --pod (default: kubectl's)");
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
