#include "echelon/architecture/language_model.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/programs.h"
#include "echelon/error.h"
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
};

void require(bool holds, const std::string& flag, const std::string& rule) {
  if (!holds) throw ConfigError("echelon sample: " + flag + " " + rule);
}

void check_sample(const SampleArguments& arguments) {
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
  const Job job = trained_job(arguments.run);
  if (!is_language_model(job.model)) {
    throw ConfigError(
        arguments.run + ": its model is " + job.model.name +
        ", not a language model; train a gpt or a llama, say");
  }
}

int sample(const SampleArguments& arguments) {
  check_sample(arguments);
  // The prompt comes last: it may look like a flag.
  become_echelon_train(
      {"sample", arguments.run, "--tokens", std::to_string(arguments.tokens),
       "--temperature", std::to_string(arguments.temperature), "--top-k",
       std::to_string(arguments.top_k), "--top-p",
       std::to_string(arguments.top_p), "--seed",
       std::to_string(arguments.seed), "--prompt", arguments.prompt});
}

}  // namespace

void add_sample(Command& root) {
  auto [command, arguments] = root.add(
      "sample", "continue a text with a trained language model",
      "echelon sample runs/text --prompt \"The layout\"\n"
      "echelon sample runs/text --prompt \"The\" --temperature 0 --tokens 50\n"
      "echelon sample runs/text/checkpoints/step-00000100 --prompt \"The\"",
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
}

}  // namespace echelon::cli
