#include "echelon/cli/arguments.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <iostream>

#include "echelon/error.h"

namespace echelon::cli {

void add_job_arguments(CLI::App& app, JobArguments& arguments, bool ranks) {
  app.add_option("CONFIG.toml", arguments.path, "the configuration")
      ->required()
      ->type_name("");
  if (ranks) {
    app.add_option(
           "-n", arguments.num_ranks,
           "how many ranks; without it as many as [layout] has")
        ->type_name("RANKS");
    app.add_option(
           "--layout", arguments.overrides.layout,
           "degrees of the mesh, as dp=2 or fsdp=2,tp=2, and their order where "
           "it "
           "is not the usual one, outermost first: dp=2,tp=2,order=tp:dp; "
           "replaces "
           "[layout]")
        ->type_name("AXIS=DEGREE,…");
    app.add_option(
           "--ranks", arguments.overrides.ranks,
           "each rank a process, or a thread of one process")
        ->type_name("processes|threads");
  }
  app.add_option(
         "--set", arguments.overrides.set,
         "set a value over the file's, as train.steps=100; repeat it "
         "for more")
      ->type_name("TABLE.KEY=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

int64_t parse_count(
    const std::string& flag, const std::string& text, int64_t lowest,
    int64_t highest) {
  int64_t count = 0;
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || rest != text.data() + text.size() ||
      count < lowest || count > highest) {
    throw ConfigError(
        flag + " " + text + ": must be a whole number from " +
        std::to_string(lowest) + " to " + std::to_string(highest));
  }
  return count;
}

Job load(const JobArguments& arguments) {
  Overrides overrides = arguments.overrides;
  if (!arguments.num_ranks.empty()) {
    overrides.num_ranks = parse_count("-n", arguments.num_ranks, 1, kMaxRanks);
  }
  return load_job(arguments.path, overrides);
}

JobFacts check(const JobArguments& arguments, const Job& job) {
  const int64_t num_ranks =
      arguments.num_ranks.empty()
          ? job.layout.num_ranks()
          : parse_count("-n", arguments.num_ranks, 1, kMaxRanks);
  JobFacts facts = check_job(job, num_ranks);
  for (const auto& warning : facts.warnings) {
    std::cerr << "warning: " << warning << "\n";
  }
  return facts;
}

std::string find_echelon_train() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = (self.parent_path() / "echelon-train").string();
  if (::access(path.c_str(), X_OK) != 0) {
    throw ConfigError(
        path + ": " + std::strerror(errno) +
        "; echelon needs it for this command, beside itself: build with "
        "LibTorch (ECHELON_LIBTORCH) and install both");
  }
  return path;
}

void become_echelon_train(const std::vector<std::string>& arguments) {
  const std::string path = find_echelon_train();
  std::vector<char*> argv{const_cast<char*>(path.c_str())};
  for (const auto& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  std::cout.flush();
  ::execv(path.c_str(), argv.data());
  throw ConfigError(path + ": cannot be started: " + std::strerror(errno));
}

}  // namespace echelon::cli
