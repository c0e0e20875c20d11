// Lets the other hosts of a job read this host's checkpoints in memory, and
// holds copies of the next host's: when a host is lost, the others go on from
// the copies. Free of LibTorch.
//
// The server is a process of its own, which ends with the launcher. Its
// connections begin with the proof that both ends have the same key.
#pragma once

#include <sys/types.h>

#include <string>

#include "echelon/authentication/key.h"
#include "echelon/checkpoint/memory/memory_slots.h"

namespace echelon {

class MemoryServer {
 public:
  /// Starts the server, on a free port of `address`, which is a number and one
  /// of this host's. No thread of this process may run but this one. `slots`
  /// then say where it is, and must outlive it. Throws ConfigError when the
  /// system refuses a socket or a process.
  MemoryServer(
      MemorySlots& slots, const std::string& address,
      const authentication::Key& key);
  /// Ends it. Its copies are gone.
  ~MemoryServer();
  MemoryServer(const MemoryServer&) = delete;
  MemoryServer& operator=(const MemoryServer&) = delete;

  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
};

}  // namespace echelon
