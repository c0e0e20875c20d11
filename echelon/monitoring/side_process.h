// A process that serves others beside this one, so that whoever they are, and
// whatever they do, they cannot disturb it.
#pragma once

#include <sys/types.h>

#include <functional>

namespace echelon::monitoring {

/// What becomes of a side process when the one that started it ends.
enum class ParentEnd { ends_it, leaves_it };

/// Starts a process that does `work`, and ends when that returns. This one may
/// have no other thread now. The process is under `name` in lists of processes,
/// gets no signal of a terminal, and has a lower priority. Of this process's
/// files it has the one that is `kept` alone. Throws Error when the system
/// refuses.
pid_t start_side_process(
    const char* name, int kept, const std::function<void()>& work,
    ParentEnd end = ParentEnd::ends_it);

}  // namespace echelon::monitoring
