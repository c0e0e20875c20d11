#include "echelon/pool/client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "echelon/error.h"
#include "echelon/text/build_info.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::pool {
namespace {

namespace fs = std::filesystem;

constexpr time_t kAnswerSeconds = 60;
// A daemon that is started again after its death takes up requests.
constexpr std::chrono::seconds kRetry{10};
constexpr std::chrono::milliseconds kPause{100};

// The answer; empty: the daemon went away.
std::string exchange(int socket, std::string_view line) {
  while (!line.empty()) {
    const ssize_t sent = ::send(socket, line.data(), line.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return "";
    line.remove_prefix(static_cast<size_t>(sent));
  }
  std::string answer;
  char bytes[1 << 16];
  while (true) {
    const ssize_t size = ::read(socket, bytes, sizeof bytes);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      throw Error(
          format("the pool's daemon has not answered in {} s", kAnswerSeconds));
    }
    if (size <= 0) return "";
    answer.append(bytes, static_cast<size_t>(size));
    if (answer.back() == '\n') return answer;
  }
}

// Connected, or closed with errno set.
FileDescriptor connect_to(const fs::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.native().size() >= sizeof address.sun_path) {
    throw ConfigError(format(
        "{}: a socket's path has at most {} bytes; name a shorter --folder",
        path.string(), sizeof address.sun_path - 1));
  }
  std::memcpy(address.sun_path, path.c_str(), path.native().size());
  FileDescriptor server(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit{kAnswerSeconds, 0};
  ::setsockopt(server.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (::connect(
          server.fd(), reinterpret_cast<const sockaddr*>(&address),
          sizeof address) != 0) {
    const int error = errno;
    server.close();
    errno = error;
  }
  return server;
}

[[noreturn]] void no_daemon(const fs::path& path, int error) {
  if (error == EACCES || error == EPERM) {
    throw ConfigError(format(
        "{}: you may not talk to this pool; whoever started it can name your "
        "group in [pool] group",
        path.string()));
  }
  throw ConfigError(format(
      "{}: no pool runs there ({}); `echelon pool start pool.toml` starts one, "
      "--folder or ECHELON_POOL names another",
      path.string(), std::strerror(error)));
}

}  // namespace

fs::path default_folder() {
  const auto named = [](const char* name) -> fs::path {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (const auto own = named("ECHELON_POOL"); !own.empty()) return own;
  const fs::path shared = "/var/lib/echelon/pool";
  std::error_code error;
  if (::geteuid() == 0 || fs::exists(shared, error)) return shared;
  fs::path state = named("XDG_STATE_HOME");
  if (!state.is_absolute()) {
    const fs::path home = named("HOME");
    if (!home.is_absolute()) {
      throw ConfigError(
          "there is no HOME for the pool's folder; name one with --folder or "
          "ECHELON_POOL");
    }
    state = home / ".local" / "state";
  }
  return state / "echelon" / "pool";
}

fs::path socket_of(const fs::path& folder) {
  return folder / "socket";
}

namespace {

// Sent again, until a daemon takes it, where that does no harm.
std::string
send_to_pool(const fs::path& folder, const std::string& line, bool repeats) {
  const fs::path path = socket_of(folder);
  const auto until = std::chrono::steady_clock::now() + kRetry;
  bool sent = false;
  while (true) {
    const FileDescriptor server = connect_to(path);
    const int error = errno;
    if (server.is_open()) {
      sent = true;
      const std::string text = exchange(server.fd(), line);
      if (!text.empty()) return text;
    } else if (!sent || !repeats) {
      no_daemon(path, error);
    }
    if (!repeats || std::chrono::steady_clock::now() > until) {
      throw Error(format(
          "{}: the daemon ended before it answered; {}", path.string(),
          repeats ? "`echelon pool list` shows whether the job was taken"
                  : "ask again when it runs"));
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

nlohmann::ordered_json
ask_pool(const fs::path& folder, nlohmann::ordered_json request) {
  request["version"] = build_info::kVersion;
  const std::string line =
      request.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";
  return answer_of(send_to_pool(folder, line, request.contains("key")));
}

std::string forward_to_pool(const fs::path& folder, const std::string& line) {
  return send_to_pool(folder, line, /*repeats=*/false);
}

nlohmann::ordered_json answer_of(const std::string& line) {
  auto answer = nlohmann::ordered_json::parse(line);
  if (answer.contains("error")) {
    const auto message = answer["error"].get<std::string>();
    if (answer.value("code", 1) == 2) throw ConfigError(message);
    throw Error(message);
  }
  return answer;
}

}  // namespace echelon::pool
