#include "echelon/pool/remote.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "echelon/authentication/channel.h"
#include "echelon/authentication/connect.h"
#include "echelon/authentication/handshake.h"
#include "echelon/authentication/token.h"
#include "echelon/error.h"
#include "echelon/monitoring/listen.h"
#include "echelon/monitoring/metric_text.h"
#include "echelon/monitoring/page_server.h"
#include "echelon/monitoring/side_process.h"
#include "echelon/pool/client.h"
#include "echelon/pool/page.h"
#include "echelon/text/build_info.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::pool {
namespace {

namespace fs = std::filesystem;
using authentication::Channel;
using authentication::Handshake;
using authentication::Key;
using RemoteJson = nlohmann::ordered_json;

constexpr std::chrono::seconds kProves{5};
// What the processes of a daemon that was killed have to end.
constexpr std::chrono::seconds kEnds{2};
constexpr time_t kSilentSeconds = 90;  // longer than the daemon may take
constexpr size_t kLongestLine = 8 << 20;
constexpr int kMostAsking = 32;       // at once
constexpr double kShown = 7 * 86400;  // seconds, on the page
constexpr const char* kCookie = "echelon_pool";

// Where the token is missing or wrong, the place is the pool's option.
authentication::Token token_of(const std::string& file) {
  try {
    return authentication::read_token(file);
  } catch (const ConfigError& error) {
    std::string text = error.what();
    if (text.starts_with("[launch] ")) text.erase(0, 9);
    throw ConfigError("--token-file: " + text);
  }
}

// Who only sees pages needs no key that starts jobs.
std::string page_token(Key key) {
  key.set_encrypts(false);
  return key.derive("pool page").to_hex();
}

Key commands_key(const Key& key) {
  Key derived = key.derive("pool commands");
  derived.set_encrypts(true);
  return derived;
}

double now_seconds() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// --- The page

// "a=1; b=2" or "a=1&b=2": the value of `name`; empty: none.
std::string
value_in(std::string_view text, std::string_view name, char separator) {
  while (!text.empty()) {
    std::string_view part = text.substr(0, text.find(separator));
    text.remove_prefix(std::min(text.size(), part.size() + 1));
    while (part.starts_with(' ')) part.remove_prefix(1);
    if (part.size() > name.size() && part.starts_with(name) &&
        part[name.size()] == '=') {
      return std::string(part.substr(name.size() + 1));
    }
  }
  return "";
}

// A bearer token, as Prometheus sends it; or, for browsers, the token in the
// page's address once, which then becomes a cookie and leaves the address.
std::optional<monitoring::PageRefusal>
check(const monitoring::PageRequest& request, const std::string& token) {
  const auto header = [&](const char* name) {
    const auto found = request.headers.find(name);
    return found == request.headers.end() ? std::string() : found->second;
  };
  const auto is_token = [&](const std::string& text) {
    return authentication::equal_in_constant_time(text, token);
  };
  const std::string bearer = header("authorization");
  if (bearer.size() > 7 && is_token(bearer.substr(7)) &&
      (bearer.starts_with("Bearer ") || bearer.starts_with("bearer "))) {
    return std::nullopt;
  }
  if (is_token(value_in(header("cookie"), kCookie, ';'))) return std::nullopt;
  const std::string given = value_in(request.query, "token", '&');
  if (is_token(given)) {
    return monitoring::PageRefusal{
        .status = 303,
        .headers = format(
            "Location: {}\r\nSet-Cookie: {}={}; HttpOnly; SameSite=Strict; "
            "Path=/; Max-Age=2592000\r\n",
            request.path, kCookie, token),
        .text = "the token is kept; go on without it\n"};
  }
  return monitoring::PageRefusal{
      .status = 401,
      .headers = "WWW-Authenticate: Bearer\r\n",
      .text = format(
          "401: {}; on the pool\u2019s host `echelon pool page` prints the "
          "address "
          "with its token, and the file page-token in the pool\u2019s folder "
          "has "
          "it for Prometheus\n",
          given.empty() && bearer.empty()
              ? "the pool\u2019s token is needed"
              : "this is not the pool\u2019s token")};
}

[[noreturn]] void serve_pages(
    FileDescriptor listener, const fs::path& folder, const std::string& token) {
  const auto page = [&]() -> std::string {
    try {
      return to_html(ask_pool(
          folder, {{"command", "page"}, {"since", now_seconds() - kShown}}));
    } catch (const std::exception& error) {
      return format("the pool does not answer: {}\n", error.what());
    }
  };
  const auto metrics = [&]() -> std::string {
    try {
      return ask_pool(folder, {{"command", "metrics"}})
          .at("text")
          .get<std::string>();
    } catch (const std::exception&) {
      return "";
    }
  };
  monitoring::PageServer server(
      std::move(listener),
      {{"/", "text/html; charset=utf-8", page},
       {"/metrics", monitoring::kMetricsType, metrics}},
      [&](const auto& request) { return check(request, token); });
  for (;;) server.serve(std::chrono::seconds(10));
}

// --- Commands

void set_limits(int socket) {
  ::fcntl(socket, F_SETFL, 0);
  const timeval limit{.tv_sec = kSilentSeconds, .tv_usec = 0};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

bool send_line(Channel& channel, std::string_view line) {
  while (!line.empty()) {
    const ssize_t sent = channel.send(line.data(), line.size());
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    line.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

// Returns the line with its end; empty: none came.
std::string receive_line(Channel& channel) {
  std::string line;
  char bytes[1 << 14];
  while (line.size() <= kLongestLine) {
    const ssize_t size = channel.receive(bytes, sizeof bytes);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return "";
    line.append(bytes, static_cast<size_t>(size));
    if (line.back() == '\n') return line;
  }
  return "";
}

std::string line_of(const RemoteJson& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

// What the daemon says, to whom a request of this process is one of its user.
std::string answer_to(const fs::path& folder, const std::string& line) {
  const auto refuse = [](const std::string& text, int code) {
    return line_of({{"error", text}, {"code", code}});
  };
  try {
    if (::geteuid() == 0 &&
        RemoteJson::parse(line).value("command", "") == "submit") {
      return refuse(
          "submit: this pool runs each job as the user who submits it, and a "
          "token does not say who that is; submit on the pool's host",
          2);
    }
    return forward_to_pool(folder, line);
  } catch (const std::exception& error) {
    return refuse(error.what(), 1);
  }
}

void serve_one(FileDescriptor socket, const fs::path& folder, const Key& key) {
  const auto state = authentication::prove(
      socket.fd(), key, authentication::Port::pool,
      std::chrono::steady_clock::now() + kProves, Handshake::End::server);
  if (state != authentication::State::proved) return;
  set_limits(socket.fd());
  Channel channel(std::move(socket), key, Handshake::End::server);
  const std::string line = receive_line(channel);
  if (!line.empty()) send_line(channel, answer_to(folder, line));
}

[[noreturn]] void serve_commands(
    const FileDescriptor& listener, const fs::path& folder, const Key& key) {
  std::atomic<int> asking = 0;
  for (;;) {
    pollfd file{listener.fd(), POLLIN, 0};
    ::poll(&file, 1, -1);
    FileDescriptor socket(::accept4(
        listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open() || asking >= kMostAsking) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    ++asking;
    std::thread([&, socket = std::move(socket)]() mutable {
      try {
        serve_one(std::move(socket), folder, key);
      } catch (const std::exception&) {
      }
      --asking;
    }).detach();
  }
}

FileDescriptor connect_to_host(const std::string& address) {
  const size_t colon = address.rfind(':');
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(format("--at {}: {}", address, why));
  };
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    refuse("it is HOST:PORT, as pool-host:9466");
  }
  std::string host = address.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(
      host.c_str(), address.substr(colon + 1).c_str(), &hints, &found);
  if (failure != 0) refuse(::gai_strerror(failure));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(
      found, ::freeaddrinfo);
  FileDescriptor socket;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    socket = authentication::connect_within(*one, kProves);
    if (socket.is_open()) return socket;
  }
  refuse(format(
      "{}; `echelon pool start --commands HOST:PORT` on the pool's host lets "
      "it "
      "listen there",
      std::strerror(errno)));
  return socket;
}

}  // namespace

RemoteAccess
serve_remotely(const fs::path& folder, const RemoteOptions& options) {
  RemoteAccess access;
  if (options.page.empty() && options.commands.empty()) return access;
  const auto token = token_of(options.token_file);
  access.token = token.source;
  if (!options.page.empty()) {
    auto listening = monitoring::listen_at(options.page, "--page", kEnds);
    const std::string own = page_token(token.key);
    access.page_url = format("http://{}/?token={}", listening.address, own);
    access.page_is_local = listening.loopback;
    write_file_atomically(folder / "page-token", own + "\n");
    monitoring::start_side_process("echelon-page", listening.socket.fd(), [&] {
      serve_pages(std::move(listening.socket), folder, own);
    });
  }
  if (!options.commands.empty()) {
    auto listening =
        monitoring::listen_at(options.commands, "--commands", kEnds);
    access.commands = listening.address;
    const Key key = commands_key(token.key);
    monitoring::start_side_process(
        "echelon-pool-tcp", listening.socket.fd(),
        [&] { serve_commands(listening.socket, folder, key); });
  }
  return access;
}

RemoteJson ask_remote_pool(
    const std::string& address, const std::string& token_file,
    RemoteJson request) {
  using authentication::State;
  const auto token = token_of(token_file);
  const Key key = commands_key(token.key);
  FileDescriptor socket = connect_to_host(address);
  const State state = authentication::prove(
      socket.fd(), key, authentication::Port::pool,
      std::chrono::steady_clock::now() + kProves);
  if (state == State::other_key) {
    throw ConfigError(format(
        "--at {}: the pool has another token than {}; copy the token file of "
        "who started the pool, and name it with --token-file",
        address, token.source));
  }
  if (state != State::proved) {
    throw ConfigError(format(
        "--at {}: {}", address,
        state == State::other_program
            ? "what listens there is no pool of this version of Echelon"
            : "it does not answer as a pool does; is it the address of "
              "--commands, and not of --page?"));
  }
  set_limits(socket.fd());
  Channel channel(std::move(socket), key, Handshake::End::client);
  request["version"] = build_info::kVersion;
  std::string text;
  if (send_line(channel, line_of(request))) text = receive_line(channel);
  if (text.empty()) {
    throw Error(format("--at {}: the pool ended before it answered", address));
  }
  return answer_of(text);
}

}  // namespace echelon::pool
