// One process of a job, and what is known of it after the daemon has died.
//
// The daemon starts a keeper, a process in a session of its own, for each
// attempt. The keeper writes who it is before it starts the command, and the
// command's exit code when all of its processes have ended. So the next daemon
// finds it, and an attempt whose keeper has not begun can be called off: both
// make the same file, and only one of them can.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "echelon/text/file_descriptor.h"

namespace echelon::pool {

/// What a keeper starts.
struct Attempt {
  std::filesystem::path folder;  // of the job, in the pool's
  int64_t number = 1;
};

struct Program {
  std::vector<std::string> command;
  std::vector<std::string> environment;
  std::string folder;  // where it starts
  int64_t user = 0;    // whose process it is
  std::string log;     // its output is added to this file
};

/// Writes down what the attempt is to start. Throws Error when it cannot.
void write_program(const Attempt& attempt, const Program& program);

/// Starts the keeper, as `echelon pool keep FOLDER NUMBER`. Throws Error.
pid_t start_keeper(const Attempt& attempt);

/// The keeper's own work: returns the exit code of its process.
int keep(const Attempt& attempt);

struct Found {
  enum class Kind {
    absent,   // it has not begun
    running,  // its keeper lives
    ended,    // with this exit code; 128 + number of a signal
    lost,     // its keeper was killed, and so its processes
    rebooted  // the machine has started anew since
  };
  Kind kind = Kind::absent;
  int exit_code = -1;
  FileDescriptor keeper =
      FileDescriptor();  // running: a pidfd, readable when it ends
};

Found find(const Attempt& attempt);

/// Keeps a keeper that has not begun from doing so; whether that worked.
bool call_off(const Attempt& attempt);

/// SIGTERM to all processes of the command, or SIGKILL, through its keeper.
void ask_to_end(const Found& found);
void kill_all(const Found& found);

}  // namespace echelon::pool
