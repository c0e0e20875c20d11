// The client's end of a TCP connection, before its handshake.
#pragma once

#include <netdb.h>

#include <chrono>
#include <memory>
#include <string>

#include "echelon/text/file_descriptor.h"

namespace echelon::authentication {

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// The address that is a number, with its port; null when it is none.
Addresses numeric_address(const std::string& number, int port);

/// Begins to connect. Not open when that fails at once, with errno. The socket
/// does not block, and is ready for writing when finish_connect() will not
/// wait.
FileDescriptor begin_connect(const addrinfo& target);
/// Waits for the connection, at most for `limit`. Returns 0, or an errno.
int finish_connect(int fd, std::chrono::milliseconds limit);

/// Both: one attempt. Not open when it fails, with errno.
FileDescriptor
connect_within(const addrinfo& target, std::chrono::milliseconds limit);

}  // namespace echelon::authentication
