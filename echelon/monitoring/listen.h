// Where a page is served: an address that a user gives.
#pragma once

#include <chrono>
#include <string>

#include "echelon/text/file_descriptor.h"

namespace echelon::monitoring {

struct Listening {
  FileDescriptor socket;  // of TCP; it does not wait
  std::string address;    // with its host: "127.0.0.1:9464"
  bool loopback = false;  // only this host reaches it
};

/// Listens at "127.0.0.1:9464", "[::1]:9464", a name and a port, or a port of
/// 127.0.0.1. Throws ConfigError, which names `option`, when the address cannot
/// be used; a port that is in use may become free for so long, since the
/// process that had it ends.
Listening listen_at(
    const std::string& address, const char* option,
    std::chrono::milliseconds patience = {});

}  // namespace echelon::monitoring
