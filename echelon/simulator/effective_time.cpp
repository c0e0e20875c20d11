#include "echelon/simulator/effective_time.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "echelon/error.h"
#include "echelon/simulator/draws.h"
#include "echelon/text/format.h"

namespace echelon::simulator {
namespace {

void check(int64_t nodes, double step_seconds, const FailureOptions& options) {
  const auto require = [](bool above_zero, const char* what, double value) {
    const bool large = above_zero ? value > 0 : value >= 0;
    if (large && std::isfinite(value)) return;
    throw ConfigError(format(
        "{} = {:g}: must be a number above 0 (0 or more for times of saving "
        "and recovery)",
        what, value));
  };
  require(true, "nodes", static_cast<double>(nodes));
  require(true, "step_seconds", step_seconds);
  require(true, "hours", options.hours);
  require(false, "checkpoint_seconds", options.checkpoint_seconds);
  require(
      false, "checkpoint_interval_seconds",
      options.checkpoint_interval_seconds);
  require(false, "recovery_seconds", options.recovery_seconds);
}

// Daly's equation 20 solved for the share: work done over the time it takes.
double expected_share(
    double interval, double saving, double recovery, double between) {
  if (!std::isfinite(between)) return interval / (interval + saving);
  const double segment = between * std::exp(recovery / between) *
                         std::expm1((interval + saving) / between);
  return interval / segment;
}

// Simulates the job's hours with failures that have no memory: the time to the
// next one is drawn after each. Work counts once it is saved; a failure loses
// what came after the last save.
class Weeks {
 public:
  Weeks(double between, const FailureOptions& options)
      : options_(options), between_(between), left_(options.hours * 3600) {
    draw();
  }

  EffectiveTime run(double interval) {
    while (left_ > 0) {
      const double work = passes(interval);
      if (failed_) {
        lose(work, 0);
        continue;
      }
      const double saved = passes(options_.checkpoint_seconds);
      if (failed_) {
        lose(work, saved);
      } else {
        sums_.share += work;
        sums_.saving += saved;
      }
    }
    const double all = options_.hours * 3600;
    for (double* sum :
         {&sums_.share, &sums_.saving, &sums_.lost, &sums_.recovering}) {
      *sum /= all;
    }
    return sums_;
  }

 private:
  void draw() {
    using simulator::mixed;
    const uint64_t word = mixed(mixed(options_.seed, 0xFA11), draws_++);
    until_failure_ = std::isfinite(between_)
                         ? -between_ * std::log(simulator::uniform(word))
                         : std::numeric_limits<double>::infinity();
  }

  // Lets `seconds` pass, or as much of them as there is until a failure or the
  // end of the hours. Returns what has passed.
  double passes(double seconds) {
    const double passed = std::min({seconds, until_failure_, left_});
    failed_ = until_failure_ <= passed && passed < left_;
    until_failure_ -= passed;
    left_ -= passed;
    return passed;
  }

  void lose(double work, double saved) {
    sums_.lost += work + saved;
    do {
      ++sums_.failures;
      draw();
      sums_.recovering += passes(options_.recovery_seconds);
    } while (failed_);
  }

  const FailureOptions& options_;
  double between_;
  double left_;
  double until_failure_ = 0;
  bool failed_ = false;
  uint64_t draws_ = 0;
  EffectiveTime sums_;
};

}  // namespace

double best_interval(double saving, double between) {
  if (saving >= 2 * between) return between;
  const double ratio = saving / (2 * between);
  return std::sqrt(2 * saving * between) *
             (1 + std::sqrt(ratio) / 3 + ratio / 9) -
         saving;
}

EffectiveTime effective_time(
    const cluster::Cluster& cluster, int64_t nodes, double step_seconds,
    const FailureOptions& options) {
  check(nodes, step_seconds, options);
  const double infinite = std::numeric_limits<double>::infinity();
  const double hours = cluster.mean_hours_between_failures;
  const double between =
      hours > 0 ? hours * 3600 / static_cast<double>(nodes) : infinite;
  double interval = options.checkpoint_interval_seconds;
  if (interval == 0) {
    interval = std::isfinite(between)
                   ? best_interval(options.checkpoint_seconds, between)
                   : options.hours * 3600;
  }
  interval = std::max(1.0, std::round(interval / step_seconds)) * step_seconds;
  EffectiveTime result = Weeks(between, options).run(interval);
  result.interval_seconds = interval;
  result.hours_between_failures = std::isfinite(between) ? between / 3600 : 0;
  result.expected_share = expected_share(
      interval, options.checkpoint_seconds, options.recovery_seconds, between);
  return result;
}

}  // namespace echelon::simulator
