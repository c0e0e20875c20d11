#include <CLI/CLI.hpp>
#include <memory>

#include "echelon/architecture/language_model.h"
#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/error.h"
#include "echelon/job/trained_job.h"

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
      "is empty; give the words to go on with");
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
        ", which is no language model; train a gpt or a llama");
  }
}

}  // namespace

void add_sample(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "sample", "print text that a trained language model goes on with");
  command->footer(
      "echelon sample runs/text --prompt \"The layout\"\n"
      "echelon sample runs/text --prompt \"The\" --temperature 0 --tokens 50\n"
      "echelon sample runs/text/checkpoints/step-00000100 --prompt \"The\"");
  auto arguments = std::make_shared<SampleArguments>();
  command
      ->add_option(
          "RUN", arguments->run,
          "the run folder, whose newest checkpoint is taken, or a checkpoint")
      ->required();
  command->add_option("--prompt", arguments->prompt, "the text to go on with")
      ->type_name("TEXT")
      ->required();
  command->add_option("--tokens", arguments->tokens, "how many tokens (200)")
      ->type_name("N");
  command
      ->add_option(
          "--temperature", arguments->temperature,
          "0: always the likeliest token; 1: as the model says (0.8)")
      ->type_name("T");
  command
      ->add_option(
          "--top-k", arguments->top_k,
          "only among so many of the likeliest tokens; 0: all")
      ->type_name("K");
  command
      ->add_option(
          "--top-p", arguments->top_p,
          "only among the likeliest that have this probability together (1)")
      ->type_name("P");
  command
      ->add_option(
          "--seed", arguments->seed, "another one gives another text (0)")
      ->type_name("S");
  command->callback([&action, arguments] {
    action = [arguments]() -> int {
      check_sample(*arguments);
      // The prompt last: it may look like a flag.
      become_echelon_train(
          {"sample", arguments->run, "--tokens",
           std::to_string(arguments->tokens), "--temperature",
           std::to_string(arguments->temperature), "--top-k",
           std::to_string(arguments->top_k), "--top-p",
           std::to_string(arguments->top_p), "--seed",
           std::to_string(arguments->seed), "--prompt", arguments->prompt});
    };
  });
}

}  // namespace echelon::cli
