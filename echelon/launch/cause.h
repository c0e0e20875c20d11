// Why a job failed: the rank whose end was the cause, and its error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "echelon/error_report.h"

namespace echelon::launch {

/// How one rank ended.
struct RankEnd {
  int rank = 0;
  int status = 0;            // from waitpid
  int64_t time_ns = 0;       // steady clock
  bool told_to_end = false;  // the launcher had sent it a signal before
  std::optional<ErrorReport> report;
  std::string stderr_tail;  // the last kilobytes of its stderr
  /// Why the kernel killed it, where it says so: memory ran out.
  std::string killed_because;
};

/// Whose failure it is, for the budgets of restarts.
enum class FailureKind {
  program,  // an exception, an exit code, a crash, a hang
  outside,  // somebody killed the rank, or its host is lost
  memory    // memory ran out, the host's or a device's
};

/// The cause of a failed job, as it is shown and returned.
struct Cause {
  int rank = -1;  // -1: the cause is a launcher's, not a rank's
  int exit_code = 1;
  std::string ending;        // "exit code 1", "SIGSEGV (Segmentation fault)"
  std::string text;          // the error itself, a few lines at most
  bool consequence = false;  // it failed because a peer did
  FailureKind kind = FailureKind::program;
  std::string log;   // its rank's log file, if any
  std::string host;  // "node 1, 10.0.0.2"; empty on one host
};

/// How the ranks of one host, or of the job, ended.
struct Outcome {
  int exit_code = 0;
  int stopped_by = 0;  // the signal by which the user stopped it
  std::optional<Cause> cause;
};

/// The outcome of a job from the outcomes of its hosts, in the order in which
/// they began to fail: the first cause that is not a consequence of another's.
Outcome combine(const std::vector<Outcome>& hosts);

/// The cause among ranks that ended, each failed or not: the earliest failure
/// that is not a consequence of another's, else the earliest. A rank that
/// somebody killed comes before those that failed up to 1 s earlier: they may
/// have noticed before its guard did. A rank that was
/// told to end is no candidate, unless it left a report of its own error, nor
/// is one that ended as ranks do that were asked to stop (ExitCode::preempted,
/// interrupted).
/// Nothing when no rank failed by itself.
std::optional<Cause> find_cause(const std::vector<RankEnd>& ends);

/// The exit code that a shell would report: the code, or 128 + signal number.
int exit_code_of(int status);
/// "exit code 3", "SIGSEGV (Segmentation fault), core dumped".
std::string describe_status(int status);

/// The error in the last lines of a program's stderr: the text of an uncaught
/// C++ exception ("std::runtime_error: text"), the last line of a Python
/// traceback, a sanitizer's or the loader's line; empty when there is none of
/// these.
std::string find_error(const std::string& stderr_tail);
/// The last lines that are not empty or noise, at most `lines`, without
/// escapes.
std::string last_lines(const std::string& stderr_tail, int lines);
/// True for the errors of allocators.
bool speaks_of_memory(const std::string& text);
/// True for the errors that a lost connection causes.
bool speaks_of_lost_peer(const std::string& text);

}  // namespace echelon::launch
