// The launcher's own signals, which it reads from a file among other events.
#pragma once

#include <signal.h>

#include <string>

namespace echelon::launch {

/// Redirects the launcher's signals to a file; restores them when destroyed.
/// One that came and was not read is dropped then: the job has ended, and the
/// launcher must end with the job's exit code.
class SignalFile {
 public:
  SignalFile();
  ~SignalFile();
  SignalFile(const SignalFile&) = delete;
  SignalFile& operator=(const SignalFile&) = delete;
  int fd() const { return fd_; }
  /// The next signal that has come; 0 when there is none.
  int next();
  /// The signal mask that ranks start with.
  const sigset_t* mask_before() const { return &before_; }

 private:
  int fd_;
  sigset_t before_;
  struct sigaction pipe_before_, size_before_;
};

/// "SIGINT".
std::string signal_name(int signal);

}  // namespace echelon::launch
