// How much of the time goes into steps that count when nodes fail.
//
// A job saves a checkpoint at intervals, and restores the newest one after a
// failure of any of its nodes. Sources: Young, 1974, doi:10.1145/361147.361115
// (the best interval); Daly, 2006, doi:10.1016/j.future.2004.11.016 (with the
// time to save and to recover, which may fail too).
#pragma once

#include <cstdint>

#include "echelon/cluster/cluster.h"

namespace echelon::simulator {

struct FailureOptions {
  double hours = 24 * 7;
  double checkpoint_seconds = 30;  // for which a save stops training
  /// Seconds of training between saves; 0: the best interval.
  double checkpoint_interval_seconds = 0;
  double recovery_seconds = 300;  // from a failure to the next step
  uint64_t seed = 0;
};

struct EffectiveTime {
  double interval_seconds = 0;        // a whole number of steps
  double hours_between_failures = 0;  // of the job; 0: it does not fail
  double expected_share = 0;  // of the time in steps that count, by formula
  /// Shares of the simulated hours, by seed; the four sum to 1.
  double share = 0;
  double saving = 0, lost = 0, recovering = 0;
  int64_t failures = 0;
};

/// Daly's best interval of training between saves, in seconds.
double
best_interval(double checkpoint_seconds, double seconds_between_failures);

/// Simulates a job on `nodes` nodes whose steps take `step_seconds`. Throws
/// ConfigError for hours, a step or a number of nodes that is not above 0, or
/// negative times.
EffectiveTime effective_time(
    const cluster::Cluster& cluster, int64_t nodes, double step_seconds,
    const FailureOptions& options);

}  // namespace echelon::simulator
