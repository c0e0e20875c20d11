// The signals that ask a training process to save and stop.
#pragma once

namespace echelon {

/// For the time before ranks have met, when there is nothing to save: SIGTERM
/// ends the process at once with ExitCode::preempted, SIGINT and SIGHUP with
/// ExitCode::interrupted. A signal that is ignored stays so.
void end_on_stop_signals();

/// From now on SIGINT, SIGTERM and SIGHUP ask the loop to save and stop after
/// the current step, and SIGUSR1 to save only. Another stop signal, more than
/// two seconds after the first, ends the process at once. It does not when the
/// state is saved, nor when Echelon's launcher sent it, which kills by itself.
/// A signal that is ignored stays so, as SIGHUP under nohup. Throws what
/// read_environment() throws.
void install_stop_signals();

/// Whether a signal has asked to stop, and whether it was SIGTERM.
bool asked_to_stop();
bool asked_by_sigterm();

/// Call it when the state is saved. Stop signals are ignored from now on, so
/// that the exit code tells that it is.
void ignore_stop_signals();

}  // namespace echelon
