// When a job stops: what to do as ranks end, signals come and time passes.
//
// Pure: events and times in, orders out. The launcher carries the orders out.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

namespace echelon::launch {

using TimePoint = std::chrono::steady_clock::time_point;

class Policy {
 public:
  /// `grace`: from SIGTERM to SIGKILL. `settle`: how long a rank that fell
  /// because a peer did waits for that peer's own end to be seen.
  Policy(std::chrono::milliseconds grace, std::chrono::milliseconds settle)
      : grace_(grace), settle_(settle) {}

  /// Signals for every living rank of this host, in order. SIGKILL is for all
  /// of their descendants too.
  using Orders = std::vector<int>;

  /// A rank ended by itself or after our orders. `failed`: not with 0;
  /// `consequence`: its own report says that a peer was at fault.
  Orders on_rank_end(bool failed, bool consequence, TimePoint now);
  /// The launcher of another host said that the job fails.
  Orders on_remote_failure(TimePoint now);
  /// A signal that asks to stop: SIGINT, SIGTERM, SIGHUP or SIGQUIT.
  Orders on_stop_signal(int signal);
  Orders on_time(TimePoint now);

  /// When on_time wants to be called next.
  std::optional<TimePoint> deadline() const { return deadline_; }
  /// The signal by which the user stopped the job; 0 when nobody did.
  int stopped_by() const { return stopped_by_; }
  /// True from the moment ranks are told to end because of a failure: how they
  /// end after that says nothing about the cause.
  bool stopping() const {
    return state_ == State::terminating || state_ == State::killed;
  }

 private:
  enum class State { running, settling, interrupted, terminating, killed };
  Orders terminate(TimePoint now);
  Orders kill();

  std::chrono::milliseconds grace_;
  std::chrono::milliseconds settle_;
  State state_ = State::running;
  int stopped_by_ = 0;
  std::optional<TimePoint> deadline_;
};

}  // namespace echelon::launch
