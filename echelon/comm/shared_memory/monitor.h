// Notices within milliseconds that another process of the host has ended, and
// fails every operation of this one.
//
// There are three sources. The kernel marks a word of shared memory when the
// thread that owns it dies, whatever the size of the process; each rank watches
// the next rank's word. Each rank also watches every other process (pidfd), and
// the sockets to rank 0 close. These two come after the kernel has freed the
// dead process's memory, about 80 ms per GiB.
#pragma once

#include <memory>
#include <vector>

#include "echelon/comm/shared_memory/segment.h"

namespace echelon::local {

class Monitor {
 public:
  virtual ~Monitor() = default;
};

/// A socket whose other end belongs to `rank`'s process.
struct PeerSocket {
  int rank = 0;
  int descriptor = -1;
};

/// Takes ownership of the sockets. The other ranks have written their pids.
std::unique_ptr<Monitor> watch_processes(
    std::shared_ptr<Segment> segment, int rank,
    std::vector<PeerSocket> sockets);

}  // namespace echelon::local
