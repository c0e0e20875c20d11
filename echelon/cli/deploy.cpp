#include <sys/stat.h>

#include <chrono>
#include <iostream>
#include <sstream>

#include "echelon/cli/deployed.h"
#include "echelon/cli/programs.h"
#include "echelon/error.h"
#include "echelon/launch/scratch.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::cli {
namespace {

struct ToFile : DeployArguments {
  std::string output;
  bool check = false;
};

std::string indented(const std::string& text) {
  std::string lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines += "  " + line + "\n";
  }
  return lines;
}

// Whether the cluster answers at all: its program fails in the same way when it
// does not, and when it refuses.
bool answers(deploy::Engine engine) {
  const bool slurm = engine == deploy::Engine::slurm;
  const std::string path = in_path(slurm ? "scontrol" : "kubectl");
  if (path.empty() || engine == deploy::Engine::ssh) return true;
  const std::vector<std::string> words =
      slurm ? std::vector<std::string>{path, "ping"}
            : std::vector<std::string>{path, "version", "--request-timeout=9s"};
  return capture(words, std::chrono::seconds(20)).exit_code == 0;
}

// Says what deployed() has checked, and checks the fields of manifests. Returns
// the exit code.
int check_here(const Deployed& made) {
  const bool kubernetes = deploy::is_kubernetes(made.engine);
  std::cout << format(
      "checked: options, names and sizes, by the rules of {} that Echelon "
      "knows\n",
      kubernetes ? "Kubernetes" : deploy::to_string(made.engine));
  if (!kubernetes) return 0;
  const auto [sources, problems] =
      deploy::check_schemas(made.engine, made.workload, made.settings);
  std::cout << format(
                   "{}: the fields of each object, by the schemas of {}\n",
                   problems.empty() ? "checked" : "refused",
                   join(sources, ", "))
            << indented(join(problems, "\n"));
  return problems.empty() ? 0 : static_cast<int>(ExitCode::configuration);
}

// Asks the engine, where its program is here. Returns the exit code.
int check_there(const Deployed& made) {
  std::string program;
  std::vector<std::string> words;
  if (made.engine == deploy::Engine::slurm) {
    program = "sbatch";
    words = {"--test-only"};
  } else if (made.engine == deploy::Engine::ssh) {
    program = "bash";
    words = {"-n"};
  } else if (deploy::is_kubernetes(made.engine)) {
    program = "kubectl";
    words = {"create", "--dry-run=server"};
    if (!made.settings.name_space.empty()) {
      words.insert(words.end(), {"-n", made.settings.name_space});
    }
    words.push_back("-f");
  } else {
    std::cout << "not checked: whether Ray has such hosts: it is asked when "
                 "the driver starts\n";
    return 0;
  }
  const std::string path = in_path(program);
  if (path.empty()) {
    std::cout << format(
        "not checked: whether this cluster takes it: there is no {} on PATH\n",
        program);
    return 0;
  }
  const launch::ScratchFolder folder;
  const std::string file = folder.path() + "/" + made.settings.name;
  write_file_atomically(file, made.text);
  std::vector<std::string> command = {path};
  command.insert(command.end(), words.begin(), words.end());
  command.push_back(file);
  const Captured answer = capture(command, std::chrono::minutes(1));
  const std::string shown = format("{} {}", program, join(words, " "));
  if (answer.timed_out) {
    std::cout << format(
        "not checked: whether this cluster takes it: `{}` gave no answer "
        "within a minute\n",
        shown);
    return 0;
  }
  const bool fine = answer.exit_code == 0;
  if (!fine && !answers(made.engine)) {
    std::cout << format(
                     "not checked: whether this cluster takes it: it cannot be "
                     "reached by `{}`\n",
                     shown)
              << indented(answer.out + answer.err);
    return 0;
  }
  std::cout << format("{}: {}\n", fine ? "checked" : "refused", shown)
            << indented(answer.out + answer.err);
  return fine ? 0 : static_cast<int>(ExitCode::configuration);
}

int deploy_job(const ToFile& arguments) {
  const Deployed made = deployed(arguments);
  if (!arguments.output.empty()) {
    // A secret is for its owner alone.
    const mode_t before = ::umask(077);
    if (made.settings.token.empty()) ::umask(before);
    try {
      write_file_atomically(arguments.output, made.text);
      ::umask(before);
    } catch (const Error& error) {
      ::umask(before);
      throw ConfigError(format("--output {}", error.what()));
    }
    std::cout << format("wrote {}\n", arguments.output);
    for (const auto& secret :
         deploy::needed_secrets(made.engine, made.workload, made.settings)) {
      std::cout << format("make its secret once: {}\n", secret.command);
    }
    std::cout << format(
        "send it: {}\n",
        deploy::send_command(made.engine, made.settings, arguments.output));
  } else if (!arguments.check) {
    std::cout << made.text;
  }
  std::cout << std::flush;
  if (!arguments.check) return 0;
  const int here = check_here(made);
  const int there = check_there(made);
  return here != 0 ? here : there;
}

}  // namespace

void add_deploy(Command& root) {
  auto [command, arguments] = root.add(
      "deploy",
      "write what starts a job under Slurm, on Kubernetes, on Ray or over ssh",
      "echelon deploy --to slurm first.toml -n 8 --nnodes 2 --time 12:00:00\n"
      "echelon deploy --to jobset first.toml -n 8 --image my/echelon --volume "
      "shared\n"
      "echelon deploy --to kueue first.toml --queue vision --image my/echelon\n"
      "echelon deploy --to slurm first.toml -n 8 --check   also ask sbatch\n"
      "echelon deploy --to ssh first.toml -n 8 --hosts a,b --output first.sh",
      deploy_job);
  add_deploy_arguments(command, arguments);
  command.option(
      "--output", arguments.output, "FILE",
      "write it to a file (default: print it)");
  command.flag(
      "--check", arguments.check,
      "check it, manifests by the published schemas, and also with `sbatch "
      "--test-only` or `kubectl create --dry-run=server` where they are; print "
      "no script");
}

}  // namespace echelon::cli
