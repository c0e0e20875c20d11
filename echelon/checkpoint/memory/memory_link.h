// A connection to a MemoryServer, and its requests, each a line of text:
//
//   size HOST NUMBER SIDE                 of the rank file of that slot
//   read HOST NUMBER SIDE OFFSET BYTES    a part of it
//   record HOST NUMBER SIDE
//   write HOST NUMBER SIDE GENERATION BYTES RECORD_BYTES, then both
//
// The answer is "ok BYTES", and then that many bytes except for `size`; or
// "error TEXT". Both ends prove the job's key first. Private to this folder.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "echelon/authentication/channel.h"
#include "echelon/authentication/key.h"
#include "echelon/text/file_descriptor.h"

namespace echelon::memory_slots {

/// How long the other end may be silent within a request.
inline constexpr std::chrono::seconds kSilence{10};

/// One end, which waits for the other. Every call throws CheckpointError when
/// the connection breaks, or after kSilence; nothing may be called after that.
class MemoryLink {
 public:
  /// Connects to a server, by the number of its address, and proves the key.
  MemoryLink(
      const std::string& address, int port, const authentication::Key& key);
  /// The server's end of a connection that was proved.
  MemoryLink(FileDescriptor socket, const authentication::Key& key);

  void send(std::string_view bytes);
  void send_file(int file, int64_t offset, int64_t bytes);
  /// Without its end.
  std::string receive_line();
  void receive(std::span<std::byte> bytes);
  /// Appends what comes to a file.
  void receive_file(int file, int64_t bytes);
  /// Waits, for any time, until something comes. False when the other end has
  /// closed the connection.
  bool wait();

  /// Sends a request and returns the number of its answer.
  int64_t ask(const std::string& request);
  int64_t answer();

 private:
  [[noreturn]] void fail(const std::string& what) const;
  static void set_limits(int socket);

  authentication::Channel channel_;
  std::string peer_;  // for errors
};

}  // namespace echelon::memory_slots
