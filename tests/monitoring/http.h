// A client of the page, as strict or as rude as a test wants it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <cerrno>
#include <string>

#include "echelon/text/file_descriptor.h"

namespace echelon::testing_support {

inline FileDescriptor connect_to(int port) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval limit{20, 0};
  setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (connect(
          socket.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) !=
      0) {
    socket.close();
  }
  return socket;
}

inline bool send_text(const FileDescriptor& socket, const std::string& text) {
  return send(socket.fd(), text.data(), text.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(text.size());
}

/// What comes until the other end closes; "(open)" is added where it does not
/// within 20 s.
inline std::string receive_all(const FileDescriptor& socket) {
  std::string text;
  char bytes[4096];
  ssize_t size;
  while ((size = recv(socket.fd(), bytes, sizeof bytes, 0)) > 0) {
    text.append(bytes, static_cast<size_t>(size));
  }
  if (size < 0 && errno == EAGAIN) text += "(open)";
  return text;
}

inline constexpr const char* kGetMetrics =
    "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// The whole answer; empty: none.
inline std::string ask_page(int port, const std::string& text = kGetMetrics) {
  const FileDescriptor socket = connect_to(port);
  if (!socket.is_open() || !send_text(socket, text)) return "";
  return receive_all(socket);
}

}  // namespace echelon::testing_support
