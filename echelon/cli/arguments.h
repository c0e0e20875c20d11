// Arguments that several commands take, and the program that does the training.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/job/check_job.h"
#include "echelon/job/job.h"

namespace CLI {
class App;
}

namespace echelon::cli {

/// CONFIG.toml and what is set over it.
struct JobArguments {
  std::string path;
  std::string num_ranks;  // as written; empty: the product of the degrees
  Overrides overrides;
};

/// Adds CONFIG and --set; with `ranks` also -n, --layout and --ranks.
void add_job_arguments(CLI::App& app, JobArguments& arguments, bool ranks);

/// Loads the job that the arguments name. Throws as load_job does.
Job load(const JobArguments& arguments);

/// check_job for the ranks that the arguments ask for, or as many as the layout
/// has; prints its warnings to stderr.
JobFacts check(const JobArguments& arguments, const Job& job);

/// "-n", "4" -> 4. Throws ConfigError unless it is a whole number in range.
int64_t parse_count(
    const std::string& flag, const std::string& text, int64_t lowest,
    int64_t highest);

/// echelon-train, beside this program. Throws ConfigError when it is not there.
std::string find_echelon_train();

/// Replaces this process by echelon-train with these arguments.
[[noreturn]] void
become_echelon_train(const std::vector<std::string>& arguments);

/// Most ranks of one host.
inline constexpr int64_t kMaxRanks = 1024;

}  // namespace echelon::cli
