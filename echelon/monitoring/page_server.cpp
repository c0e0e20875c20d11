#include "echelon/monitoring/page_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <utility>

#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

using std::chrono::milliseconds;

bool is_token(std::string_view text) {
  // RFC 9110, 5.6.2.
  constexpr std::string_view kOther = "!#$%&'*+-.^_`|~";
  return !text.empty() && std::ranges::all_of(text, [&](unsigned char c) {
    return std::isalnum(c) != 0 ||
           kOther.find(static_cast<char>(c)) != std::string_view::npos;
  });
}

bool is_visible(std::string_view text, std::string_view kept) {
  return std::ranges::all_of(text, [&](unsigned char c) {
    return (c > 0x20 && c < 0x7f) ||
           kept.find(static_cast<char>(c)) != std::string_view::npos;
  });
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text[0] == ' ' || text[0] == '\t')) {
    text.remove_prefix(1);
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) {
    text.remove_suffix(1);
  }
  return text;
}

// The text before `end`, which is removed from `text` too.
std::string_view
take_until(std::string_view& text, std::string_view end, bool& found) {
  const size_t at = text.find(end);
  found = at != std::string_view::npos;
  const auto taken = text.substr(0, at);
  text.remove_prefix(found ? at + end.size() : text.size());
  return taken;
}

// Of the lines after the first. False when they are not as they should be;
// `request.status` then says how.
bool read_headers(
    std::string_view lines, bool needs_host, PageRequest& request) {
  const auto refuse = [&](int status) {
    request.status = status;
    return false;
  };
  int hosts = 0;
  while (!lines.empty()) {
    bool found = false;
    std::string_view value = take_until(lines, "\r\n", found);
    const std::string_view name = take_until(value, ":", found);
    if (!found || !is_token(name)) return refuse(400);
    value = trimmed(value);
    if (!is_visible(value, " \t")) return refuse(400);
    const std::string key = lower(name);
    if (key == "host" && ++hosts > 1) return refuse(400);
    if (key == "transfer-encoding") return refuse(501);
    if (key == "content-length" && value != "0") return refuse(413);
    request.headers.emplace(key, value);
  }
  return !needs_host || hosts > 0 || refuse(400);
}

std::string_view reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 303:
      return "See Other";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Content Too Large";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Bad Request";
  }
}

std::string
head_of(int status, std::string_view type, size_t size, std::string_view more) {
  return format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n"
      "Connection: close\r\nCache-Control: no-store\r\n"
      "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
      "{}\r\n",
      status, reason_of(status), type, size, more);
}

}  // namespace

std::optional<PageRequest> read_request(std::string_view bytes) {
  PageRequest request;
  const auto refuse = [&](int status) {
    request.status = status;
    return request;
  };
  const size_t end = bytes.find("\r\n\r\n");
  if (end == std::string_view::npos) {
    if (bytes.size() >= PageServer::kMostRequestBytes) return refuse(431);
    return std::nullopt;
  }
  std::string_view lines = bytes.substr(0, end + 2);
  bool first = false, second = false;
  std::string_view version = take_until(lines, "\r\n", first);
  const std::string_view method = take_until(version, " ", first);
  std::string_view target = take_until(version, " ", second);
  if (!first || !second || !is_token(method) || target.empty() ||
      !is_visible(target, "")) {
    return refuse(400);
  }
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    const bool other = version.starts_with("HTTP/") && is_visible(version, "");
    return refuse(other ? 505 : 400);
  }
  if (!read_headers(lines, version == "HTTP/1.1", request)) return request;
  if (method != "GET") return refuse(405);
  request.path = take_until(target, "?", first);
  request.query = target;
  return request;
}

PageServer::PageServer(
    FileDescriptor listener, std::vector<ServedPage> pages, PageGuard guard)
    : listener_(std::move(listener)), guard_(std::move(guard)) {
  for (ServedPage& page : pages) pages_.push_back({std::move(page)});
}

void PageServer::serve(milliseconds at_most) {
  const auto now = Clock::now();
  auto until = now + at_most;
  const bool rests =
      in_second_ >= kMostInASecond && now - second_ < std::chrono::seconds(1);
  if (rests) until = std::min(until, second_ + std::chrono::seconds(1));
  std::vector<pollfd> files = {{rests ? -1 : listener_.fd(), POLLIN, 0}};
  for (const Connection& one : connections_) {
    const bool writes = one.body && !one.ended;
    files.push_back(
        {one.socket.fd(), static_cast<short>(writes ? POLLOUT : POLLIN), 0});
    until = std::min(until, one.began + kMostTime);
  }
  const auto left = std::chrono::ceil<milliseconds>(until - now).count();
  poll(
      files.data(), files.size(), static_cast<int>(std::max<int64_t>(0, left)));
  const auto late = Clock::now() - kMostTime;
  size_t number = 0;
  std::erase_if(connections_, [&](Connection& one) {
    const bool ready = files[++number].revents != 0;
    return (ready && !advance(one)) || one.began <= late;
  });
  if (files[0].revents != 0) accept_some();
}

void PageServer::accept_some() {
  const auto now = Clock::now();
  if (now - second_ >= std::chrono::seconds(1)) {
    second_ = now;
    in_second_ = 0;
  }
  while (in_second_ < kMostInASecond) {
    FileDescriptor socket(accept4(
        listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      // Without files, say, the next ones wait too: this does not spin.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        in_second_ = kMostInASecond;
      }
      return;
    }
    ++in_second_;
    // The oldest has had the most time.
    if (connections_.size() == kMostConnections) {
      connections_.erase(connections_.begin());
    }
    connections_.push_back({std::move(socket), now, {}, {}, {}, 0, false});
  }
}

bool PageServer::advance(Connection& connection) {
  if (!connection.body) return read(connection);
  if (!connection.ended) return write(connection);
  // What the other end still sends is dropped until it has read the answer.
  char bytes[4096];
  const ssize_t size =
      recv(connection.socket.fd(), bytes, sizeof bytes, MSG_DONTWAIT);
  return size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
}

bool PageServer::read(Connection& connection) {
  char bytes[kMostRequestBytes];
  const ssize_t size = recv(
      connection.socket.fd(), bytes,
      kMostRequestBytes - connection.request.size(), MSG_DONTWAIT);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  if (size == 0) return false;
  connection.request.append(bytes, static_cast<size_t>(size));
  const auto request = read_request(connection.request);
  if (!request) return true;
  answer(connection, *request);
  return write(connection);
}

void PageServer::answer(Connection& connection, const PageRequest& request) {
  if (request.status != 200)
    return refuse(connection, {request.status, "", ""});
  if (guard_) {
    if (auto refusal = guard_(request)) {
      return refuse(connection, std::move(*refusal));
    }
  }
  const auto found = std::ranges::find_if(
      pages_, [&](const Made& one) { return one.page.path == request.path; });
  if (found == pages_.end()) return refuse(connection, {404, "", ""});
  const auto now = Clock::now();
  if (!found->text || now - found->when > kPageAge) {
    found->text = std::make_shared<const std::string>(found->page.make());
    found->when = now;
  }
  connection.body = found->text;
  connection.head = head_of(200, found->page.type, connection.body->size(), "");
}

void PageServer::refuse(Connection& connection, PageRefusal refusal) const {
  const int status = refusal.status;
  if (refusal.text.empty()) {
    std::vector<std::string> paths;
    for (const Made& one : pages_) paths.push_back(one.page.path);
    refusal.text = format(
        "{} {}; the page is at {}, for GET\n", status, reason_of(status),
        join(paths, " and "));
  }
  if (status == 405) refusal.headers += "Allow: GET\r\n";
  connection.body = std::make_shared<const std::string>(refusal.text);
  connection.head = head_of(
      status, "text/plain; charset=utf-8", connection.body->size(),
      refusal.headers);
}

bool PageServer::write(Connection& connection) {
  const std::string& head = connection.head;
  const std::string& body = *connection.body;
  while (connection.sent < head.size() + body.size()) {
    const bool in_head = connection.sent < head.size();
    const std::string_view rest =
        in_head ? std::string_view(head).substr(connection.sent)
                : std::string_view(body).substr(connection.sent - head.size());
    const ssize_t size = send(
        connection.socket.fd(), rest.data(), rest.size(),
        MSG_NOSIGNAL | MSG_DONTWAIT | (in_head ? MSG_MORE : 0));
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    connection.sent += static_cast<size_t>(size);
  }
  connection.ended = true;
  shutdown(connection.socket.fd(), SHUT_WR);
  return true;
}

}  // namespace echelon::monitoring
