// A training step frees and allocates the same big blocks again and again;
// glibc gives them back to the system each time, and the page faults cost more
// than the communication (173 ms instead of 119 a step, measured on a 41 M
// parameter network). So it is told to keep them.
#pragma once

namespace echelon::local {

/// For this process, once; called by every World, make_hub and join_processes.
/// With share_tensors the arena does it instead.
void keep_freed_memory();

}  // namespace echelon::local
