// A store that only the ranks of one job can use.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "echelon/authentication/key.h"
#include "echelon/comm/store/store_server.h"

namespace echelon {

/// Where a private store is served, and with which key.
struct StorePlace {
  std::string address;  // a name or a number
  int port = 0;
  authentication::Key key;
};

/// Connects to the StoreServer at `place`, where both ends prove that they have
/// the key. Waits until it listens, at most for `timeout`, which is also how
/// long get() and wait() wait for a key. `server`: on the rank that serves,
/// ended with the last store that has it.
///
/// The store throws what c10d's TCPStore throws: DistStoreError when a key does
/// not come in time, DistNetworkError when the connection breaks. A value that
/// the server refuses (StoreLimits) throws CommError. Thread-safe; calls run
/// one after the other, and wait for the server's answer without a limit
/// (bounded_store.h). Has no queues.
///
/// Throws CommError when nobody listens in time, and when who listens has
/// another key or is another program.
c10::intrusive_ptr<c10d::Store> connect_private_store(
    const StorePlace& place, std::chrono::milliseconds timeout,
    std::shared_ptr<StoreServer> server = nullptr);

}  // namespace echelon
