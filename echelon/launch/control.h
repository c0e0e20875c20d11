// Requests to a job while it runs, from programs of the same user on its host.
//
// The launcher listens on an abstract Unix socket, which lives in no folder and
// ends with its process. Each side checks the other's user.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "echelon/text/file_descriptor.h"

namespace echelon::launch {

/// The launcher's side.
class ControlSocket {
 public:
  /// Listens at `name`. Throws ConfigError when another process does.
  explicit ControlSocket(const std::string& name);

  /// Readable when somebody asks.
  int fd() const { return socket_.fd(); }
  /// Reads one request and sends what `answer` returns for it. Other users are
  /// turned away, except for root.
  void serve(const std::function<std::string(const std::string&)>& answer);

 private:
  FileDescriptor socket_;
};

/// Sends `request` to the job at `name` and returns its answer; empty when no
/// job of `user` (or of root) is there. Throws Error when it does not answer in
/// time.
std::string ask_job(
    const std::string& name, const std::string& request,
    uid_t user = geteuid());

}  // namespace echelon::launch
