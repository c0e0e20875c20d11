#include "echelon/cli/arguments.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "echelon/cli/terminal.h"
#include "echelon/config/byte_size.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/timeline/metrics.h"

namespace echelon::cli {
namespace {

// The ranks of all hosts together.
int64_t num_ranks(const JobArguments& arguments) {
  return arguments.num_hosts *
         parse_count("-n", arguments.num_ranks, 1, kMaxRanks);
}

}  // namespace

void add_job_arguments(Command& command, JobArguments& arguments, bool ranks) {
  auto& overrides = arguments.overrides;
  command.positional("CONFIG.toml", arguments.path, "the configuration");
  if (ranks) {
    command.option(
        "-n", arguments.num_ranks, "RANKS",
        "number of ranks, of each host; by default as many as [layout] has");
    command.option(
        "--layout", overrides.layout, "AXIS=DEGREE,…",
        "degrees of the mesh in place of [layout], as in dp=2 or fsdp=2,tp=2; "
        "another order than the usual one, outermost first, as in "
        "dp=2,tp=2,order=tp:dp");
    command.option(
        "--ranks", overrides.ranks, "processes|threads",
        "run each rank as a process, or as a thread of one process");
  }
  command.repeated_option(
      "--set", overrides.set, "TABLE.KEY=VALUE",
      "override a value of the file, as in train.steps=100; may be repeated");
}

void add_job_flags(Command& command, JobFlags& flags) {
  command.option(
      "--model", flags.model, "MODEL",
      "a name of the catalogue (gpt3-175b, llama3.1-8b, resnet50, …), a "
      "Hugging Face config.json, or its folder");
  command.option(
      "--cluster", flags.cluster, "CLUSTER",
      "DEVICE:NODESxDEVICES (h100-sxm:64x8), DEVICE:DEVICES, several joined by "
      "+, or a cluster file");
  command.option(
      "--batch", flags.batch, "SAMPLES", "samples of a step, over all ranks");
  command.option(
      "--seq-len", flags.seq_len, "TOKENS",
      "tokens of a sample (default: the model's)");
  command.option(
      "--precision", flags.precision, "PRECISION",
      "dtype of matmuls: bf16, fp16, fp8, fp32, … (default: bf16; plan: the "
      "best one of the devices)");
  command.option(
      "--stack", flags.stack, "SOFTWARE",
      "the framework whose methods and efficiency are assumed: echelon, "
      "megatron-core, fsdp, … (default: echelon)");
  command.option(
      "--expert-load", flags.expert_load, "LOAD",
      "how unevenly tokens are spread over the ranks of ep: the busiest one's "
      "over the mean (1.3), or a run's folder, for what it measured (default: "
      "evenly)");
}

cost::ExpertLoad
parse_expert_load(const std::string& text, const cost::ModelShape& model) {
  if (text.empty()) return {};
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(format("--expert-load {}: {}", text, why));
  };
  const int64_t experts =
      model.transformer ? model.transformer->experts.experts : 0;
  if (experts == 0) refuse(model.name + " has no experts; leave it out");
  cost::ExpertLoad load;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, load.busiest);
  if (error == std::errc() && rest == end) {
    if (!(load.busiest >= 1 && std::isfinite(load.busiest))) {
      refuse("the busiest rank has the mean, which is 1, or more");
    }
    return load;
  }
  const auto path = std::filesystem::path(text) / "metrics.jsonl";
  if (!std::filesystem::exists(path)) {
    refuse("is no number, and no run: there is no " + path.string());
  }
  load = cost::measured_load(timeline::read_metrics(path).steps);
  if (load.layers.empty()) {
    refuse("the run has measured no loads of experts; give a number, as 1.3");
  }
  const auto measured = static_cast<int64_t>(load.layers.front().size());
  if (measured != experts) {
    refuse(format(
        "the run has {} experts in a layer, and {} has {}; name a run of this "
        "model, or give a number",
        measured, model.name, experts));
  }
  return load;
}

int64_t parse_count(
    const std::string& flag, const std::string& text, int64_t lowest,
    int64_t highest) {
  int64_t count = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, count);
  if (error != std::errc() || rest != end || count < lowest ||
      count > highest) {
    throw ConfigError(format(
        "{} {}: must be a whole number from {} to {}", flag, text, lowest,
        highest));
  }
  return count;
}

int64_t parse_size(
    const std::string& flag, const std::string& text, int64_t lowest,
    int64_t highest) {
  const auto bytes = config::parse_bytes(text);
  if (!bytes || *bytes < lowest || *bytes > highest) {
    throw ConfigError(format(
        "{} {}: must be a size from {} to {}, such as 64MiB, 2GB or a number "
        "of bytes",
        flag, text, config::bytes_text(lowest), config::bytes_text(highest)));
  }
  return *bytes;
}

void check_choice(
    const std::string& flag, const std::string& word,
    const std::vector<std::string>& choices) {
  if (std::ranges::find(choices, word) != choices.end()) return;
  throw ConfigError(format(
      "{} {}: must be one of {}{}", flag, word, join(choices, ", "),
      config::did_you_mean(word, choices)));
}

Job load(const JobArguments& arguments) {
  Overrides overrides = arguments.overrides;
  if (!arguments.num_ranks.empty()) {
    overrides.num_ranks = num_ranks(arguments);
  }
  return load_job(arguments.path, overrides);
}

JobFacts check(const JobArguments& arguments, const Job& job) {
  const int64_t ranks = arguments.num_ranks.empty() ? job.layout.num_ranks()
                                                    : num_ranks(arguments);
  JobFacts facts = check_job(job, ranks);
  for (const auto& warning : facts.warnings) {
    std::cerr << "warning: " << warning << "\n";
  }
  return facts;
}

void write_output(
    const std::string& flag, const std::string& path,
    const std::function<void(std::ostream&)>& write) {
  std::ofstream file(path, std::ios::binary);
  if (file) write(file);
  file.close();
  if (!file) {
    throw ConfigError(format(
        "{} {}: cannot be written: {}", flag, path, std::strerror(errno)));
  }
}

}  // namespace echelon::cli
