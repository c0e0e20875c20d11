// How a job stops: the decisions as ranks end, signals come and time passes.
//
// Pure: events and times in, orders out. The launcher carries the orders out.
//
//   state        meaning                             leaves for
//   running      no rank has failed                  settling, terminating
//   settling     a rank failed because a peer did    terminating, by `settle`
//                                                    (killed instead of
//                                                    terminating when the job
//                                                    will start again)
//   interrupted  the user's signal was forwarded     killed
//   terminating  SIGTERM was sent to all             killed, after `grace`
//   killed       SIGKILL was sent to all
#pragma once

#include <chrono>
#include <optional>
#include <vector>

namespace echelon::launch {

using TimePoint = std::chrono::steady_clock::time_point;

class Policy {
 public:
  /// `grace`: from SIGTERM to SIGKILL. `settle`: how long after a rank that
  /// failed because a peer did the end of that peer is waited for.
  Policy(std::chrono::milliseconds grace, std::chrono::milliseconds settle)
      : grace_(grace), settle_(settle) {}

  /// Signals for every living rank of this host, in order. SIGKILL also goes to
  /// all of their descendants.
  using Orders = std::vector<int>;

  /// A rank ended, by itself or after an order. `failed`: not with 0;
  /// `consequence`: its own report says that a peer was at fault; `at_once`:
  /// the job will start again, so the others need no time to end.
  Orders on_rank_end(
      bool failed, bool consequence, TimePoint now, bool at_once = false);
  /// The launcher of another host reported that the job fails.
  Orders on_remote_failure(TimePoint now, bool at_once = false);
  /// A signal that asks this launcher to stop: SIGINT, SIGTERM, SIGHUP or
  /// SIGQUIT. The first is forwarded. Schedulers send theirs to several
  /// processes, some of which pass it on, so one that comes within kSameStop of
  /// the first is the same stop; a later one kills.
  Orders on_stop_signal(int signal, TimePoint now);
  /// The launcher of another host had such a signal. It never kills.
  Orders on_remote_stop(int signal);
  Orders on_time(TimePoint now);

  /// When on_time wants to be called next.
  std::optional<TimePoint> deadline() const { return deadline_; }
  /// The signal by which the user stopped the job; 0 when nobody did.
  int stopped_by() const { return stopped_by_; }
  /// True once ranks were told to end because of a failure: how they end after
  /// that says nothing about the cause.
  bool stopping() const {
    return state_ == State::terminating || state_ == State::killed;
  }

 private:
  enum class State { running, settling, interrupted, terminating, killed };
  static constexpr std::chrono::milliseconds kSameStop{2000};

  Orders forward(int signal);
  Orders terminate(TimePoint now);
  Orders kill();

  std::chrono::milliseconds grace_;
  std::chrono::milliseconds settle_;
  State state_ = State::running;
  bool at_once_ = false;
  int stopped_by_ = 0;
  std::optional<TimePoint> first_signal_;
  std::optional<TimePoint> deadline_;
};

}  // namespace echelon::launch
