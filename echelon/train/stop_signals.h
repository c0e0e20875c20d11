// The signals that ask a training process to save and stop.
#pragma once

namespace echelon {

/// From now on SIGINT, SIGTERM and SIGHUP ask the loop to save and stop after
/// the current step, and SIGUSR1 to save only. Another stop signal ends the
/// process at once when it comes more than two seconds after the first, unless
/// the state is saved, or our launcher passed it on: that one kills by itself.
/// SIGHUP stays ignored where it is (nohup). Throws what read_environment()
/// throws.
void install_stop_signals();

/// Whether a signal has asked to stop, and whether it was SIGTERM.
bool asked_to_stop();
bool asked_by_sigterm();

/// Call it when the state is saved: whatever comes now, the process ends with
/// the exit code of that.
void ignore_stop_signals();

}  // namespace echelon
