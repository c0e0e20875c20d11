// Starts the ranks of a job on this host, watches them, and tells why it ended.
#pragma once

#include "echelon/launch/options.h"

namespace echelon::launch {

/// Runs the job to its end and returns what this process should exit with:
///
///   0    every rank ended with 0
///   N    the exit code of the rank that failed first (128 + signal number for
///        a signal); its own error is the last thing printed, to stderr
///   130  stopped by SIGINT, SIGTERM or SIGHUP to the launcher
///
/// The first rank that fails takes the others down: SIGTERM to all, SIGKILL
/// after options.grace. SIGINT, SIGTERM and SIGHUP are passed on once; a second
/// one kills. No process started here outlives this one by more than a second,
/// however it ends; SIGKILL included.
///
/// Throws ConfigError when the job cannot start: options out of range, a
/// program that cannot be executed, a port in use, hosts that do not meet.
///
/// Call it from a process with one thread: it forks. Signal handling and the
/// mask are as before when it returns.
int run(const LaunchOptions& options);

}  // namespace echelon::launch
