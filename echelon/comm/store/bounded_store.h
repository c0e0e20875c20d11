// A store whose calls end, although its server hangs.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace echelon {

/// `store` with a limit on how long a call takes. TCPStore and a private store
/// read their server's answers without one, so a rank 0 that is stopped, or
/// whose host is cut off, would hold every rank that asks it something.
///
///   limit  how long the server may take to answer. A call that waits for a key
///          has its own time-out beside it
///   place  where the server is and who runs it; errors name it
///
/// A call that is not answered in time throws a CommError, and so does every
/// call after it, at once. Thread-safe; calls run one after the other. Has no
/// queues: c10d's backends use none.
c10::intrusive_ptr<c10d::Store> bounded_store(
    c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds limit,
    std::string place);

}  // namespace echelon
