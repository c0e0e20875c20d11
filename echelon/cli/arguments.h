// Arguments that several commands share.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "echelon/cli/command_line.h"
#include "echelon/cost/model_shape.h"
#include "echelon/job/check_job.h"
#include "echelon/job/job.h"

namespace echelon::cli {

/// Most ranks of one host.
inline constexpr int64_t kMaxRanks = 1024;

/// CONFIG.toml and what overrides it.
struct JobArguments {
  std::string path;
  std::string num_ranks;  // as written; empty: the product of the degrees
  int64_t num_hosts = 1;  // each has so many ranks
  Overrides overrides;
};

/// Adds CONFIG and --set; with `ranks` also -n, --layout and --ranks.
void add_job_arguments(Command& command, JobArguments& arguments, bool ranks);

/// Loads the job that the arguments name. Throws as load_job does.
Job load(const JobArguments& arguments);

/// check_job for the ranks that the arguments ask for, or for as many as the
/// layout has. Prints its warnings to stderr.
JobFacts check(const JobArguments& arguments, const Job& job);

/// Flags of plan and simulate, as written; empty: not given.
struct JobFlags {
  std::string model, cluster, batch, seq_len, precision, stack, expert_load;
};

void add_job_flags(Command& command, JobFlags& flags);

/// The value of --expert-load: a number, or the loads that a run measured; even
/// when it is empty. Throws ConfigError for a number below 1, a model without
/// experts, and a run that has measured no loads, or those of other experts.
cost::ExpertLoad
parse_expert_load(const std::string& text, const cost::ModelShape& model);

/// "-n", "4" -> 4. Throws ConfigError unless it is a whole number in range.
int64_t parse_count(
    const std::string& flag, const std::string& text, int64_t lowest,
    int64_t highest);

/// "--bytes", "64 MiB" -> 67108864. Throws ConfigError unless it is in range.
int64_t parse_size(
    const std::string& flag, const std::string& text, int64_t lowest,
    int64_t highest);

/// Throws ConfigError, with the nearest choice, unless `word` is one of them.
void check_choice(
    const std::string& flag, const std::string& word,
    const std::vector<std::string>& choices);

/// Writes the file that `flag` names. Throws ConfigError when it cannot be
/// written.
void write_output(
    const std::string& flag, const std::string& path,
    const std::function<void(std::ostream&)>& write);

}  // namespace echelon::cli
