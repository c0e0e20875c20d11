// Starts the ranks of a job on this host, watches them, and reports why the job
// ended.
#pragma once

#include "echelon/launch/options.h"

namespace echelon::launch {

/// Runs the job to its end and returns the exit code for this process:
///
///   0    every rank ended with 0
///   N    the exit code of the rank that failed first (128 + signal number for
///        a signal); its own error is the last thing printed, to stderr
///   130  stopped by SIGINT, SIGTERM or SIGHUP to the launcher
///
/// When the first rank fails, the others are stopped: SIGTERM to all, SIGKILL
/// after options.grace. SIGINT, SIGTERM and SIGHUP are forwarded once; another
/// one more than 2 s later kills. No process started here outlives this one by
/// more than a second, however this one ends, SIGKILL included.
///
/// With options.max_restarts a rank that hangs (hang_watch.h) has failed too,
/// the others are killed at once, and all ranks start again, unless the error
/// is one that a user must mend (ExitCode 2, 3, 4) or a signal asked the job to
/// stop. Restarts has the budgets. The code is then that of the last failure,
/// or 93 when three restarts in a row brought no new step.
///
/// Throws ConfigError when the job cannot start: options out of range, a
/// program that cannot be executed, a port in use, hosts that do not meet.
///
/// Must be called from a process with one thread, since it forks. On return the
/// signal handlers and the mask are as before.
int run(const LaunchOptions& options);

}  // namespace echelon::launch
