// The launcher's own signals, read from a file between other events.
#pragma once

#include <signal.h>

#include <string>

namespace echelon::launch {

/// Signals of the launcher as the job wants them; as before when destroyed.
class SignalFile {
 public:
  SignalFile();
  ~SignalFile();
  SignalFile(const SignalFile&) = delete;
  SignalFile& operator=(const SignalFile&) = delete;
  int fd() const { return fd_; }
  /// The next signal that has come; 0 when there is none.
  int next();
  /// What ranks start with.
  const sigset_t* mask_before() const { return &before_; }

 private:
  int fd_;
  sigset_t before_;
  struct sigaction pipe_before_;
};

/// "SIGINT".
std::string signal_name(int signal);

}  // namespace echelon::launch
