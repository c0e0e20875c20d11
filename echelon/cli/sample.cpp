#include "echelon/architecture/language_model.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/programs.h"
#include "echelon/error.h"
#include "echelon/job/check_job.h"
#include "echelon/job/run_folder.h"

namespace echelon::cli {
namespace {

struct SampleArguments {
  std::string run;
  std::string prompt;
  int64_t tokens = 200;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1.0;
  int64_t seed = 0;
  Overrides overrides;
};

void require(bool holds, const std::string& flag, const std::string& rule) {
  if (!holds) throw ConfigError("echelon sample: " + flag + " " + rule);
}

// Returns the run's configuration.
Job check_sample(const SampleArguments& arguments) {
  require(
      !arguments.prompt.empty(), "--prompt",
      "is empty; give the text to continue");
  require(arguments.tokens >= 1, "--tokens", "must be 1 or more");
  require(arguments.temperature >= 0, "--temperature", "must be 0 or more");
  require(arguments.top_k >= 0, "--top-k", "must be 0 (no limit) or more");
  require(
      arguments.top_p > 0 && arguments.top_p <= 1, "--top-p",
      "must be more than 0 and at most 1");
  require(arguments.seed >= 0, "--seed", "must be 0 or more");
  Job job = trained_job(arguments.run);
  if (!is_language_model(job.model)) {
    throw ConfigError(
        arguments.run + ": its model is " + job.model.name +
        ", not a language model; train a gpt or a llama, say");
  }
  return job;
}

// Starts the ranks of the layout that the command line gives.
int sample_on_ranks(
    Job job, const SampleArguments& arguments,
    std::vector<std::string> command) {
  job.layout = {};  // that of the training does not count
  const ScratchConfig config(job);
  job = load_job(config.path(), arguments.overrides);
  job.document = {};  // its places are in a file that goes away
  check_sampling(job);
  config.write(job);
  command.insert(command.begin() + 2, {"--config", config.path()});
  return launch_echelon_train(command, job.layout.num_ranks(), job.train.ranks);
}

int sample(const SampleArguments& arguments) {
  const Job job = check_sample(arguments);
  // The prompt comes last: it may look like a flag.
  const std::vector<std::string> command = {
      "sample",        arguments.run,
      "--tokens",      std::to_string(arguments.tokens),
      "--temperature", std::to_string(arguments.temperature),
      "--top-k",       std::to_string(arguments.top_k),
      "--top-p",       std::to_string(arguments.top_p),
      "--seed",        std::to_string(arguments.seed),
      "--prompt",      arguments.prompt};
  const Overrides& overrides = arguments.overrides;
  if (overrides.layout.empty() && overrides.set.empty()) {
    become_echelon_train(command);
  }
  return sample_on_ranks(job, arguments, command);
}

}  // namespace

void add_sample(Command& root) {
  auto [command, arguments] = root.add(
      "sample", "continue a text with a trained language model",
      "echelon sample runs/text --prompt \"The layout\"\n"
      "echelon sample runs/text --prompt \"The\" --temperature 0 --tokens 50\n"
      "echelon sample runs/text/checkpoints/step-00000100 --prompt \"The\"\n"
      "echelon sample runs/text --prompt \"$(cat book.txt)\" --layout cp=4",
      sample);
  command.positional(
      "RUN", arguments.run,
      "a checkpoint, or a run's folder (its newest checkpoint)");
  command.required_option(
      "--prompt", arguments.prompt, "TEXT", "the text to continue");
  command.option(
      "--tokens", arguments.tokens, "N", "number of tokens (default: 200)");
  command.option(
      "--temperature", arguments.temperature, "T",
      "0: always the most likely token; 1: the model's probabilities (default: "
      "0.8)");
  command.option(
      "--top-k", arguments.top_k, "K",
      "choose among the K most likely tokens; 0: among all (default: 0)");
  command.option(
      "--top-p", arguments.top_p, "P",
      "choose among the most likely tokens that together have this probability "
      "(default: 1)");
  command.option(
      "--seed", arguments.seed, "S",
      "another seed gives another text "
      "(default: 0)");
  command.option(
      "--layout", arguments.overrides.layout, "AXIS=DEGREE,…",
      "ranks of this host that compute each token together: those of cp have "
      "parts of the text, those of tp parts of the layers, as in cp=4 or "
      "cp=2,tp=2 (default: one device)");
  command.repeated_option(
      "--set", arguments.overrides.set, "TABLE.KEY=VALUE",
      "override a value of the run's configuration, as in "
      "layout.context=ring; may be repeated");
}

}  // namespace echelon::cli
