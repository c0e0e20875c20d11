// A process that serves others beside this one, so that whoever they are, and
// whatever they do, they cannot disturb it.
#pragma once

#include <sys/types.h>

#include <functional>

namespace echelon::monitoring {

/// Starts a process that does `work`, which does not return. It ends with this
/// one, which may have no other thread now; it is under `name` in lists of
/// processes, gets no signal of a terminal, and has a lower priority. Of this
/// process's files it has the one that is `kept` alone. Throws Error when the
/// system refuses.
pid_t start_side_process(
    const char* name, int kept, const std::function<void()>& work);

}  // namespace echelon::monitoring
