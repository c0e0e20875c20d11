#include "echelon/launch/policy.h"

#include <signal.h>

namespace echelon::launch {

Policy::Orders Policy::on_rank_end(
    bool failed, bool consequence, TimePoint now, bool at_once) {
  if (!failed) return {};
  at_once_ = at_once;
  switch (state_) {
    case State::running:
      if (consequence) {
        state_ = State::settling;
        deadline_ = now + settle_;
        return {};
      }
      return terminate(now);
    case State::settling:
      return consequence ? Orders{} : terminate(now);
    case State::interrupted:
      // The ranks were asked to end; the rest may be waiting for this one.
      if (!deadline_) deadline_ = now + grace_;
      return {};
    case State::terminating:
    case State::killed:
      return {};
  }
  return {};
}

Policy::Orders Policy::on_remote_failure(TimePoint now, bool at_once) {
  return on_rank_end(true, false, now, at_once);
}

Policy::Orders Policy::on_stop_signal(int signal, TimePoint now) {
  if (state_ == State::killed) return {};
  if (state_ == State::terminating) return kill();
  if (!first_signal_) {
    first_signal_ = now;
    return stopped_by_ == 0 ? forward(signal) : Orders{};
  }
  // A terminal that closes sends SIGHUP more than once: not an order to kill.
  if (signal == SIGHUP || now - *first_signal_ <= kSameStop) return {};
  return kill();
}

Policy::Orders Policy::on_remote_stop(int signal) {
  if (stopped_by_ != 0 || stopping()) return {};
  return forward(signal);
}

Policy::Orders Policy::forward(int signal) {
  stopped_by_ = signal;
  state_ = State::interrupted;
  deadline_.reset();
  return {signal};
}

Policy::Orders Policy::on_time(TimePoint now) {
  if (!deadline_ || now < *deadline_) return {};
  return state_ == State::settling ? terminate(now) : kill();
}

Policy::Orders Policy::terminate(TimePoint now) {
  if (at_once_) return kill();
  state_ = State::terminating;
  deadline_ = now + grace_;
  return {SIGTERM};
}

Policy::Orders Policy::kill() {
  state_ = State::killed;
  deadline_.reset();
  return {SIGKILL};
}

}  // namespace echelon::launch
