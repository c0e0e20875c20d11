// One guard process per rank: it starts the rank, forwards signals, tells the
// launcher how the rank ended, and leaves no process of it behind.
//
// The guard is a forked copy of the launcher that holds one end of a socket.
// When the launcher ends, for whatever reason, the socket closes and the guard
// kills every descendant of the rank. It is their subreaper, so a program that
// a wrapper script started, or that detached itself, cannot escape it; the rank
// itself also dies with its guard (PR_SET_PDEATHSIG).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace echelon::launch {

/// A message of a guard to the launcher.
struct GuardReport {
  enum Kind : int32_t {
    started,      // value: unused; the rank's process is there
    fork_failed,  // value: errno
    exec_failed,  // value: errno
    stopped,      // value: the signal (SIGSTOP, SIGTTIN, …)
    continued,
    exited,  // value: status from waitpid
    empty,   // no process of the rank is left; the guard ends
  };
  Kind kind = started;
  int32_t value = 0;
  int32_t pid = 0;       // the rank's
  int64_t time_ns = 0;   // steady clock
  bool ordered = false;  // exited: an order had told the rank to end
};

/// A message of the launcher to a guard.
struct GuardOrder {
  int32_t signal = 0;  // to the rank's process group; SIGKILL: to every
                       // descendant
  bool ends = false;   // it tells the rank to end
};

/// The program that a guard starts. File descriptors are the launcher's; -1
/// means /dev/null for `input`, and inherited for the others.
struct GuardSpec {
  std::string path;                      // of the program
  std::vector<std::string> command;      // argv
  std::vector<std::string> environment;  // envp
  int input = -1;
  int output = -1;
  int error = -1;
  int master_fd = -1;                 // stays open in the rank
  std::string error_file;             // removed if the launcher is gone
  std::string scratch_dir;            // likewise, once empty
  const void* signal_mask = nullptr;  // sigset_t that the rank starts with
  /// The guard's process has loaded the program (ForkServer).
  bool loaded = false;
};

struct Guard {
  pid_t pid = -1;
  int socket = -1;  // close-on-exec, non-blocking, SOCK_SEQPACKET
};

/// Forks the guard. Throws ConfigError when the system refuses a process or a
/// socket. The guard keeps open only the launcher's files that its spec names,
/// and those that were open without close-on-exec.
Guard start_guard(const GuardSpec& spec);

/// Makes this process, which has one thread, the guard that reports to
/// `socket`. Returns in the rank, where the program is loaded; otherwise never.
void run_guard(const GuardSpec& spec, int socket);

/// The descendants of `root`, from /proc, without the processes in `except` and
/// their descendants.
std::vector<pid_t>
descendants(pid_t root, const std::vector<pid_t>& except = {});

int64_t steady_now_ns();

/// The strings as exec takes them. They must outlive what is returned.
std::vector<char*> argv_of(const std::vector<std::string>& strings);

}  // namespace echelon::launch
