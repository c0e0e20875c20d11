#include "echelon/launch/host_listener.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

using authentication::Handshake;
using authentication::State;
using std::chrono::milliseconds;

constexpr milliseconds kProofTimeout{2000};
constexpr milliseconds kHelloTimeout{5000};
constexpr milliseconds kFull{1000};
constexpr size_t kMaxStrangers = 256;  // besides the job's hosts
// The kernel keeps fewer where net.core.somaxconn says so. The hosts of a job
// come at once, and one that finds no room comes again a second later.
constexpr int kBacklog = 4096;
constexpr int kMostAtOnce = 64;  // connections that are taken in a turn

}  // namespace

HostListener::HostListener(
    BoundSocket socket, authentication::Token token, int most_hosts,
    milliseconds patience)
    : token_(std::move(token)),
      most_hosts_(static_cast<size_t>(most_hosts)),
      proof_timeout_(std::min(kProofTimeout, patience / 4)),
      hello_timeout_(std::min(kHelloTimeout, patience / 4)),
      listener_(std::move(socket.socket)),
      place_{socket.address, socket.port} {
  fcntl(listener_.fd(), F_SETFL, O_NONBLOCK);
  if (listen(listener_.fd(), kBacklog) != 0) {
    throw ConfigError(format(
        "[launch] master {}, port {}: the port is in use ({}); give another "
        "--master-port",
        place_.address, place_.port, std::strerror(errno)));
  }
}

void HostListener::add_files(std::vector<pollfd>& files) const {
  const bool full = full_ && !full_->passed();
  files.push_back({full ? -1 : listener_.fd(), POLLIN, 0});
  for (const Newcomer& newcomer : newcomers_) {
    files.push_back({newcomer.fd(), POLLIN, 0});
  }
}

std::vector<HostListener::Caller> HostListener::serve(const pollfd* files) {
  std::vector<Caller> callers;
  std::vector<Newcomer> remaining;
  for (size_t i = 0; i < newcomers_.size(); ++i) {
    Newcomer& newcomer = newcomers_[i];
    if (files[1 + i].revents != 0 && advance(newcomer, callers)) continue;
    if (newcomer.silence.passed()) {
      turn_away(
          newcomer,
          format(
              "it did not {} within {}",
              newcomer.handshake ? "prove the token" : "say which node it is",
              newcomer.silence.seconds()));
    } else {
      remaining.push_back(std::move(newcomer));
    }
  }
  newcomers_ = std::move(remaining);
  for (int i = 0; i < kMostAtOnce && files[0].revents != 0; ++i) {
    const size_t before = newcomers_.size();
    accept_newcomer();
    if (newcomers_.size() <= before) break;
  }
  return callers;
}

// Makes room by closing the connection that has proved nothing for longest: a
// host does so at once.
void HostListener::accept_newcomer() {
  FileDescriptor socket(
      accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const bool full = !socket.is_open() && (errno == EMFILE || errno == ENFILE ||
                                          errno == ENOBUFS || errno == ENOMEM);
  if (!socket.is_open() && !full) return;
  if (full && newcomers_.empty()) {
    if (!full_) {
      std::fprintf(
          stderr,
          "echelon: cannot take the connection of another host at %s, port %d: "
          "%s; `ulimit -n` tells and sets how many files may be open\n",
          place_.address.c_str(), place_.port, std::strerror(errno));
    }
    full_.emplace(kFull);
    return;
  }
  if (full || newcomers_.size() >= most_hosts_ + kMaxStrangers) {
    auto victim = std::ranges::find_if(
        newcomers_, [](const Newcomer& one) { return !!one.handshake; });
    if (victim == newcomers_.end()) victim = newcomers_.begin();
    turn_away(
        *victim, format(
                     "it did not prove the token, and {} connections wait",
                     newcomers_.size()));
    newcomers_.erase(victim);
  }
  if (!socket.is_open()) return;
  newcomers_.push_back(
      {std::move(socket), HostLink(),
       Handshake(
           token_.key, authentication::Port::launchers, Handshake::End::server),
       Deadline(proof_timeout_)});
}

void HostListener::close_strangers() {
  std::erase_if(newcomers_, [](const Newcomer& one) {
    return one.handshake.has_value();
  });
}

// Who has not proved the token is told nothing.
void HostListener::turn_away(Newcomer& newcomer, const std::string& reason) {
  if (newcomer.handshake) {
    strangers_.tell(newcomer.fd(), reason);
    newcomer.socket.close();
  } else {
    refuse(newcomer.link, reason);
  }
}

void HostListener::refuse(HostLink& link, const std::string& reason) {
  link.say({{"refused", reason}});
  link.close();
}

bool HostListener::advance(Newcomer& newcomer, std::vector<Caller>& callers) {
  if (newcomer.handshake) return take_proof(newcomer);
  const bool open = newcomer.link.receive();
  if (const auto message = newcomer.link.take()) {
    callers.push_back({std::move(newcomer.link), message->dump()});
    return true;
  }
  return !open;
}

bool HostListener::take_proof(Newcomer& newcomer) {
  switch (newcomer.handshake->advance(newcomer.fd())) {
    case State::open:
      return false;
    case State::closed:
      return true;
    case State::proved:
      newcomer.handshake.reset();
      newcomer.link = HostLink(
          std::move(newcomer.socket), token_.key, Handshake::End::server);
      newcomer.silence = Deadline(hello_timeout_);
      return false;
    case State::other_program:
      turn_away(
          newcomer,
          "it does not speak as a launcher of this version, or only one of "
          "the two hosts has --tls");
      return true;
    case State::other_key:
      turn_away(
          newcomer,
          format(
              "it has another token than {}; if it is a host of this job, "
              "give it the same token, as a file with mode 0600",
              token_.source));
      return true;
  }
  return true;
}

}  // namespace echelon::launch
