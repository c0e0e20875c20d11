#include "echelon/launch/signals.h"

#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

namespace echelon::launch {

SignalFile::SignalFile() {
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int signal :
       {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP,
        SIGWINCH}) {
    struct sigaction action {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) {  // as nohup leaves SIGHUP
      sigaddset(&wanted, signal);
    }
  }
  sigprocmask(SIG_BLOCK, &wanted, &before_);
  fd_ = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_before_);
  sigaction(SIGXFSZ, &ignore, &size_before_);
}

SignalFile::~SignalFile() {
  while (next() != 0) {
  }
  close(fd_);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  sigaction(SIGXFSZ, &size_before_, nullptr);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

int SignalFile::next() {
  signalfd_siginfo info;
  return read(fd_, &info, sizeof info) == sizeof info
             ? static_cast<int>(info.ssi_signo)
             : 0;
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name
                         : "signal " + std::to_string(signal);
}

}  // namespace echelon::launch
