#include "echelon/launch/restarts.h"

#include <algorithm>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {

bool Restarts::helps(int exit_code) {
  switch (static_cast<ExitCode>(exit_code)) {
    case ExitCode::done:
    case ExitCode::configuration:
    case ExitCode::data:
    case ExitCode::numeric:
    case ExitCode::preempted:
    case ExitCode::do_not_requeue:
    case ExitCode::interrupted:
      return false;
    default:
      return true;
  }
}

bool Restarts::left(FailureKind kind) const {
  switch (kind) {
    case FailureKind::program:
      return by_program_ < most_;
    case FailureKind::outside:
      return most_ > 0 || elastic_;
    case FailureKind::memory:
      return most_ > 0 && for_memory_ < kMostForMemory;
  }
  return false;
}

Restarts::Decision
Restarts::on_end(const Outcome& outcome, std::optional<int64_t> step) {
  if (!outcome.cause || outcome.stopped_by != 0 || !helps(outcome.exit_code)) {
    return {};
  }
  FailureKind kind = outcome.cause->kind;
  // The launcher's own errors, as of a program that cannot be executed.
  if (outcome.cause->rank < 0 && kind != FailureKind::outside) return {};
  const bool lost_host = outcome.cause->rank < 0;
  if (kind == FailureKind::outside && !step && !lost_host) {
    kind = FailureKind::program;
  }
  const bool progress = !step || !step_ || *step > *step_;
  without_progress_ = progress ? 0 : without_progress_ + 1;
  step_ = step;
  if (without_progress_ == kMostWithoutProgress) return {Verdict::stuck};
  Decision decision;
  if (!left(kind)) {
    if (kind == FailureKind::memory && most_ > 0) {
      decision.words =
          "no restart: memory ran out before, and nothing has changed since";
    }
    return decision;
  }
  decision.verdict = Verdict::restart;
  if (without_progress_ > 0) {
    decision.wait = std::min(
        kLongestWait, std::chrono::seconds(1 << (without_progress_ - 1)));
  }
  switch (kind) {
    case FailureKind::program:
      decision.words =
          format("{} of {} (--max-restarts)", ++by_program_, most_);
      break;
    case FailureKind::outside:
      decision.words = format(
          "{} after {}, which --max-restarts does not count", ++from_outside_,
          lost_host ? "a host was lost" : "a kill from outside");
      break;
    case FailureKind::memory:
      decision.words = format(
          "{} of {} after memory ran out", ++for_memory_, kMostForMemory);
      break;
  }
  return decision;
}

}  // namespace echelon::launch
