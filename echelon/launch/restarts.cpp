#include "echelon/launch/restarts.h"

#include "echelon/error.h"

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

Restarts::Verdict Restarts::on_end(
    const Outcome& outcome, std::optional<int64_t> step, bool lost_host) {
  const bool by_a_rank = outcome.cause && outcome.cause->rank >= 0;
  if ((!by_a_rank && !lost_host) || outcome.stopped_by != 0 ||
      !helps(outcome.exit_code)) {
    return Verdict::end;
  }
  const bool progress = !step || !step_ || *step > *step_;
  without_progress_ = progress ? 0 : without_progress_ + 1;
  step_ = step;
  if (without_progress_ == kMostWithoutProgress) return Verdict::stuck;
  if (lost_host) return Verdict::restart;
  if (!left()) return Verdict::end;
  ++count_;
  return Verdict::restart;
}

}  // namespace echelon::launch
