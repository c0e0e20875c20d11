#include "echelon/train/stop_signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "echelon/environment/rank_environment.h"
#include "echelon/error.h"
#include "echelon/train/saving/saver.h"

namespace echelon {
namespace {

constexpr int64_t kSameStopNs = 2'000'000'000;

std::atomic<bool> asked{false};
std::atomic<bool> terminated{false};
std::atomic<int64_t> first_ns{0};   // of those that the launcher did not send
std::atomic<bool> launched{false};  // by our launcher

int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

// The loop looks at the first signal after a step, which may never end: a later
// one ends the process. A scheduler signals launcher and ranks, and the
// launcher passes its own on, so what comes at once is the same stop.
void on_stop_signal(int signal, siginfo_t* info, void*) {
  if (signal == SIGTERM) terminated = true;
  asked = true;
  if (launched && info->si_pid == getppid()) return;
  const int64_t now = monotonic_ns();
  int64_t first = 0;
  if (first_ns.compare_exchange_strong(first, now)) return;
  if (now - first > kSameStopNs) std::_Exit(128 + signal);
}

void end_on_stop_signal(int signal) {
  std::_Exit(static_cast<int>(
      signal == SIGTERM ? ExitCode::preempted : ExitCode::interrupted));
}

void set_stop_signals(const struct sigaction& action, bool keep_ignored) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (keep_ignored && before.sa_handler == SIG_IGN) continue;
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace

void end_on_stop_signals() {
  struct sigaction action {};
  action.sa_handler = end_on_stop_signal;
  set_stop_signals(action, /*keep_ignored=*/true);
}

void install_stop_signals() {
  install_save_signal();
  launched = read_environment().launcher == Launcher::echelon;
  struct sigaction action {};
  action.sa_sigaction = on_stop_signal;
  action.sa_flags = SA_SIGINFO;
  set_stop_signals(action, /*keep_ignored=*/true);
}

bool asked_to_stop() {
  return asked;
}
bool asked_by_sigterm() {
  return terminated;
}

void ignore_stop_signals() {
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  set_stop_signals(action, /*keep_ignored=*/false);
}

}  // namespace echelon
