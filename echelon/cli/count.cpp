#include "echelon/cli/count.h"

#include <chrono>
#include <cmath>
#include <iostream>
#include <string>

#include "echelon/cli/programs.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cli {
namespace {

constexpr std::chrono::seconds kCountLimit{120};

// The first line of the error, without its "error: ". A library may have
// printed others before it.
std::string first_error(const std::string& text) {
  const std::string mark = "error: ";
  const size_t after = ("\n" + text).find("\n" + mark);
  const size_t begin = after == std::string::npos ? 0 : after + mark.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

}  // namespace

bool is_counted_alone(const Job& job) {
  return job.model.name == kOwnModel || job.data.name == DataKind::own;
}

cost::ModelShape count_layers(Job job, bool on_processor) {
  job.comm.backend = BackendKind::automatic;
  job.comm.device = on_processor ? DeviceKind::cpu : DeviceKind::cuda;
  const ScratchConfig config(job);
  const launch::ScratchFolder folder;
  const std::string layers = folder.path() + "/layers.json";
  const Captured counted = capture(
      {find_echelon_train(), "count", config.path(), "--save", layers},
      kCountLimit);
  if (counted.exit_code != 0) {
    throw ConfigError(
        counted.err.empty() ? "echelon-train count did not end in time"
                            : first_error(counted.err));
  }
  return cost::read_counted_model(layers);
}

void count_own_parameters(Job job, JobFacts& facts) {
  if (job.model.name != kOwnModel) return;
  // On one rank, so that each parameter is counted once.
  job.layout = {};
  job.train.rank_batch = {};
  try {
    facts.num_parameters =
        std::llround(count_layers(job, /*on_processor=*/true).num_parameters());
    facts.num_trained = facts.num_saved = facts.num_parameters;
  } catch (const ConfigError& error) {
    std::cerr << format(
        "warning: whether the model fits into memory is not known: {}\n",
        error.what());
  }
}

}  // namespace echelon::cli
