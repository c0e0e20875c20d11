// How a job ended, and what the launcher says of it.
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "echelon/cluster/host.h"
#include "echelon/error.h"
#include "echelon/launch/job.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::launch {

// Empty unless the kernel has killed a process for lack of memory since the
// ranks were started.
std::string Job::shortage_of_memory() const {
  const auto now = cluster::memory_group();
  if (now.killed.value_or(0) <= memory_before_.killed.value_or(0)) return "";
  std::string text = "the kernel did this because memory ran out";
  if (now.limit_bytes > 0) {
    text += format(
        "; this job's control group may have {}",
        format_bytes(now.limit_bytes));
  }
  if (now.peak_bytes > 0) {
    text += format(" and had {} at most", format_bytes(now.peak_bytes));
  }
  return text + "; give it more memory, or start fewer ranks";
}

Outcome Job::local_outcome() {
  const int interrupted = static_cast<int>(ExitCode::interrupted);
  Outcome outcome;
  outcome.stopped_by = policy_.stopped_by();
  if (!start_error_.empty()) {
    outcome.exit_code = static_cast<int>(ExitCode::configuration);
    outcome.cause = Cause{.exit_code = outcome.exit_code, .text = start_error_};
    return outcome;
  }
  std::vector<RankEnd> ends;
  for (const Rank& rank : ranks_) ends.push_back(rank.end);
  auto cause = find_cause(ends);
  if (cause) {
    cause->log = log_path(cause->rank);
    outcome.exit_code = cause->exit_code;
    outcome.cause = std::move(cause);
    return outcome;
  }
  for (const Rank& rank : ranks_) {
    if (rank.end.status == 0 && rank.ended) continue;
    const int code = exit_code_of(rank.end.status);
    const bool special = code == static_cast<int>(ExitCode::preempted) ||
                         code == static_cast<int>(ExitCode::do_not_requeue);
    if (special || outcome.exit_code == 0) {
      outcome.exit_code = special ? code : interrupted;
    }
  }
  if (options_.preemptible && outcome.stopped_by == SIGTERM &&
      outcome.exit_code == interrupted) {
    outcome.exit_code = static_cast<int>(ExitCode::preempted);
  }
  if (answered_ && outcome.exit_code == 0) {
    outcome.exit_code = options_.answer_code;
  }
  return outcome;
}

void Job::report(const Outcome& outcome) {
  if (!outcome.cause) {
    if (resize_ || changes_hosts_) return;
    if (outcome.stopped_by != 0 && outcome.exit_code != 0) {
      say("stopped by " + signal_name(outcome.stopped_by));
    } else if (outcome.exit_code == static_cast<int>(ExitCode::preempted)) {
      say("ranks were told to stop, not by this launcher; queue the job again");
    }
    return;
  }
  const Cause& cause = *outcome.cause;
  if (cause.rank < 0) {
    screen_.drain(std::chrono::milliseconds(2000));
    if (outcome.exit_code == static_cast<int>(ExitCode::configuration)) {
      throw ConfigError(cause.text);
    }
    say(cause.text);
    return;
  }
  const std::string name = format("rank {}", cause.rank);
  std::string head = format(
      "{}{} ended with {}", name,
      cause.host.empty() ? "" : format(" ({})", cause.host), cause.ending);
  const auto stopped = std::count_if(
      ranks_.begin(), ranks_.end(),
      [](const Rank& rank) { return rank.end.told_to_end; });
  if (!hosts_.alone()) {
    head += "; the others were stopped";
  } else if (stopped > 0) {
    head += stopped == 1 ? "; the other one was stopped"
                         : format("; the other {} were stopped", stopped);
  }
  say(head + (cause.log.empty() ? "" : "; its output: " + cause.log));
  const bool colours = screen_.colours(2);
  std::string text = cause.text;
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos;) {
    text.replace(at, 1, "\n  ");
    at += 3;
  }
  screen_.write(
      2, (colours ? "\x1b[1;31m" : "") + name + ": " + text +
             (colours ? "\x1b[0m\n" : "\n"));
}

}  // namespace echelon::launch
