// What was simulated, as the configuration that a run's folder has.
#pragma once

#include <string>

#include "echelon/cli/simulate_case.h"

namespace echelon::cli {

struct SimulatedConfiguration {
  std::string text;     // config.toml; empty: `echelon train` has no such model
  std::string missing;  // what it does not say, and why; empty: nothing
};

/// CONFIG with what the flags changed; of a model of the catalogue what the
/// planner would print, with no data to train on (images: made-up ones). Throws
/// ConfigError where flags are none for `echelon train`.
SimulatedConfiguration
configuration_of(const SimulateArguments& arguments, const SimulateCase& what);

}  // namespace echelon::cli
