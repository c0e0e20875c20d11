// The server of the ranks' private store.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "echelon/authentication/key.h"

namespace echelon {

struct StoreLimits {
  size_t key = size_t{4} << 10;           // bytes of a key
  size_t value = size_t{8} << 20;         // bytes of a value, as in TCPStore
  size_t total = size_t{1} << 30;         // bytes of all keys and values
  size_t connections = size_t{4096};      // that have proved the key
  size_t strangers = 256;                 // that have not yet
  std::chrono::milliseconds proof{2000};  // how long they may take
};

/// Serves a key-value store, on a thread of its own, to who proves `key`
/// (authentication/handshake.h). Other connections are told nothing and are
/// closed, and so is one that sends what is no message of this store
/// (store_messages.h).
class StoreServer {
 public:
  /// Takes over `listener`, a bound TCP socket. Throws ConfigError when it
  /// cannot listen.
  StoreServer(
      int listener, const authentication::Key& key, StoreLimits limits = {});
  /// Closes all connections.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace echelon
