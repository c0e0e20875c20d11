// Ranks are forked from a process that has loaded their program.
//
// Loading LibTorch takes most of a rank's start, and ranks of one host load it
// at the same time. The launcher starts the program once more, as the fork
// server: it stops at the beginning of main(), and each rank, and its guard, is
// a fork of it. A restarted rank then runs after some milliseconds.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "echelon/launch/guard.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::launch {

/// The launcher's side. The server ends with the launcher, and does without it
/// when this is destroyed; what it forked lives on.
class ForkServer {
 public:
  ForkServer() = default;
  ~ForkServer() { end(); }
  ForkServer(const ForkServer&) = delete;
  ForkServer& operator=(const ForkServer&) = delete;

  /// Starts the server before it is needed, so that it has loaded the program
  /// then. Of `spec` it needs path, command, environment and signal mask.
  void warm(const GuardSpec& spec);

  /// Has the server fork the guard of a rank, as start_guard() does. The first
  /// call starts the server. Nothing when the server does not serve, which the
  /// caller takes as a reason for start_guard(): it could not be started, its
  /// program has threads before main(), it was killed, it takes a minute, or
  /// `interrupt` became readable while it loaded.
  std::optional<Guard> start_guard(const GuardSpec& spec, int interrupt);

  /// -1 when there is none.
  pid_t pid() const { return pid_; }

 private:
  bool start(const GuardSpec& spec);
  void end();

  pid_t pid_ = -1;
  FileDescriptor socket_;
  bool failed_ = false;
};

/// The program's side, to be called first in main(), before any thread is
/// started. Returns at once unless this process is a fork server. Otherwise it
/// returns in each rank, which has its own standard files and environment then,
/// as after an exec; in the server itself it never returns.
void serve_forks();

}  // namespace echelon::launch
