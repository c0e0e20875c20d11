// One thread waits for all connections with epoll. A connection is a stranger
// until its handshake is over; then it has one call at a time, so that it holds
// one message, either what has come of a call or what is left of an answer. A
// call that waits for keys is on the list of the first one that is missing.
#include "echelon/comm/store/store_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "echelon/authentication/channel.h"
#include "echelon/authentication/handshake.h"
#include "echelon/authentication/strangers.h"
#include "echelon/comm/store/store_messages.h"
#include "echelon/error.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using authentication::Handshake;
using ServerClock = std::chrono::steady_clock;

constexpr uint64_t kStop = 0;
constexpr uint64_t kListener = 1;
constexpr size_t kChunk = size_t{64} << 10;
constexpr int kMostEvents = 64;
// In one turn, so that the others are read in between.
constexpr int kMostAccepted = 16;
// Until it is tried again to accept, when there are no files left.
constexpr std::chrono::milliseconds kPause{100};

/// A call that waits for keys.
struct StoreWait {
  std::vector<std::string> keys;
  size_t next = 0;      // all before it were there
  bool values = false;  // whether it is answered with the values
};

struct StoreConnection {
  FileDescriptor socket;               // until it has proved the key
  authentication::Channel channel;     // from then on
  std::optional<Handshake> handshake;  // until then
  std::string input;                   // what has come of a call
  std::string output;                  // what is left of an answer
  std::optional<StoreWait> waits;
  std::optional<ServerClock::time_point> deadline;

  int fd() const { return handshake ? socket.fd() : channel.fd(); }
};

void release(std::string& text) {
  text.clear();
  if (text.capacity() > kChunk) text.shrink_to_fit();
}

}  // namespace

class StoreServer::Loop {
 public:
  Loop(int listener, const authentication::Key& key, StoreLimits limits)
      : listener_(listener),
        key_(key),
        limits_(limits),
        poll_(epoll_create1(EPOLL_CLOEXEC)),
        stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    const int flags = fcntl(listener_, F_GETFL);
    if (poll_ < 0 || stop_ < 0 || flags < 0 ||
        fcntl(listener_, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(listener_, F_SETFD, FD_CLOEXEC) != 0 ||
        listen(listener_, 1024) != 0) {
      const int error = errno;
      close_all();
      throw ConfigError(format(
          "store: cannot listen: {}; if another job uses the port, set "
          "MASTER_PORT to a free one",
          std::strerror(error)));
    }
    watch(EPOLL_CTL_ADD, stop_, EPOLLIN, kStop);
    watch(EPOLL_CTL_ADD, listener_, EPOLLIN, kListener);
    thread_ = std::thread([this] { run(); });
  }

  ~Loop() {
    const uint64_t one = 1;
    (void)!write(stop_, &one, sizeof one);
    thread_.join();
    close_all();
  }

 private:
  void run() {
    std::array<epoll_event, kMostEvents> events;
    for (;;) {
      const int count =
          epoll_wait(poll_, events.data(), kMostEvents, timeout_ms());
      for (int i = 0; i < count; ++i) {
        const uint64_t id = events[i].data.u64;
        if (id == kStop) return;
        if (id == kListener) {
          accept_connections();
        } else if (const auto found = connections_.find(id);
                   found != connections_.end()) {
          if (!serve(id, found->second)) drop(id);
        }
      }
      // A process that was stopped first reads what came meanwhile.
      if (count < kMostEvents) expire();
    }
  }

  void watch(int operation, int fd, uint32_t events, uint64_t id) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    epoll_ctl(poll_, operation, fd, &event);
  }

  int timeout_ms() const {
    auto next = resume_;
    if (!deadlines_.empty() && (!next || deadlines_.begin()->first < *next)) {
      next = deadlines_.begin()->first;
    }
    if (!next) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        *next - ServerClock::now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000));
  }

  void expire() {
    const auto now = ServerClock::now();
    if (resume_ && *resume_ <= now) {
      resume_.reset();
      watch(EPOLL_CTL_MOD, listener_, EPOLLIN, kListener);
    }
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      const uint64_t id = deadlines_.begin()->second;
      StoreConnection& connection = connections_.at(id);
      if (connection.handshake) {
        refuse(
            id, format(
                    "it did not prove the key of the store within {:g} s",
                    std::chrono::duration<double>(limits_.proof).count()));
        continue;
      }
      set_deadline(id, connection, std::nullopt);
      const std::string missing =
          connection.waits->keys[connection.waits->next];
      forget_wait(id, connection);
      if (!answer(
              id, connection, StoreWriter(StoreAnswer::late).text(missing))) {
        drop(id);
      }
    }
  }

  void accept_connections() {
    for (int i = 0; i < kMostAccepted; ++i) {
      const int fd =
          accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        const bool full = errno == EMFILE || errno == ENFILE ||
                          errno == ENOBUFS || errno == ENOMEM;
        if (full && !strangers_.empty()) {
          refuse(*strangers_.begin(), "there are no files left for it");
          continue;
        }
        if (full) {
          watch(EPOLL_CTL_MOD, listener_, 0, kListener);
          resume_ = ServerClock::now() + kPause;
        }
        return;
      }
      if (strangers_.size() >= limits_.strangers) {
        refuse(
            *strangers_.begin(),
            "it did not prove the key of the store, and "
            "many connections wait");
      }
      const int yes = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      const uint64_t id = next_id_++;
      StoreConnection& connection = connections_[id];
      connection.socket = FileDescriptor(fd);
      connection.handshake.emplace(
          key_, authentication::Port::store, Handshake::End::server);
      strangers_.insert(id);
      set_deadline(id, connection, ServerClock::now() + limits_.proof);
      watch(EPOLL_CTL_ADD, fd, EPOLLIN, id);
    }
  }

  // False when the connection is to be dropped.
  bool serve(uint64_t id, StoreConnection& connection) {
    if (connection.handshake) return advance(id, connection);
    if (!connection.output.empty()) return flush(id, connection);
    return receive(id, connection);
  }

  bool advance(uint64_t id, StoreConnection& connection) {
    using authentication::State;
    switch (connection.handshake->advance(connection.fd())) {
      case State::open:
        return true;
      case State::closed:
        return false;
      case State::proved:
        connection.handshake.reset();
        connection.channel = authentication::Channel(
            std::move(connection.socket), key_, Handshake::End::server);
        strangers_.erase(id);
        set_deadline(id, connection, std::nullopt);
        return connections_.size() - strangers_.size() <= limits_.connections;
      case State::other_program:
        told_.tell(connection.fd(), "it does not speak as a rank");
        return false;
      case State::other_key:
        told_.tell(connection.fd(), "it has not the key of this job's store");
        return false;
    }
    return false;
  }

  bool receive(uint64_t id, StoreConnection& connection) {
    std::string& input = connection.input;
    for (;;) {
      size_t wanted = StoreWriter::kSize;
      if (input.size() >= StoreWriter::kSize) {
        uint32_t size = 0;
        std::memcpy(&size, input.data(), sizeof size);
        if (size == 0 || size > kMaxStoreMessage) return false;
        wanted += size;
      }
      if (input.size() == wanted && wanted > StoreWriter::kSize) {
        const bool lives = call(id, connection);
        release(input);
        return lives;
      }
      std::array<char, kChunk> bytes;
      const ssize_t size = connection.channel.receive(
          bytes.data(), std::min(bytes.size(), wanted - input.size()));
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      // Who waits for an answer has nothing to say.
      if (size <= 0 || connection.waits) return false;
      input.append(bytes.data(), static_cast<size_t>(size));
    }
  }

  // Answers a call, or keeps it until its keys are there.
  bool call(uint64_t id, StoreConnection& connection) {
    StoreReader reader(
        std::string_view(connection.input).substr(StoreWriter::kSize));
    const auto kind = static_cast<StoreCall>(reader.kind());
    switch (kind) {
      case StoreCall::set:
        return set(id, connection, reader);
      case StoreCall::append:
        return append(id, connection, reader);
      case StoreCall::replace:
        return replace(id, connection, reader);
      case StoreCall::add:
        return add(id, connection, reader);
      case StoreCall::remove: {
        const std::string key(reader.text());
        if (!reader.ended()) return false;
        return answer_number(id, connection, erase(key));
      }
      case StoreCall::check: {
        const auto keys = read_keys(reader);
        if (!keys) return false;
        return answer_number(
            id, connection, std::ranges::all_of(*keys, [&](const auto& key) {
              return values_.contains(key);
            }));
      }
      case StoreCall::count:
        if (!reader.ended()) return false;
        return answer_number(
            id, connection, static_cast<int64_t>(values_.size()));
      case StoreCall::wait:
      case StoreCall::get:
        return wait(id, connection, reader, kind == StoreCall::get);
    }
    return false;
  }

  bool set(uint64_t id, StoreConnection& connection, StoreReader& reader) {
    std::vector<std::pair<std::string_view, std::string_view>> pairs;
    const int64_t count = reader.number();
    for (int64_t i = 0; i < count && reader.ok(); ++i) {
      const std::string_view key = reader.text();
      pairs.emplace_back(key, reader.text());
    }
    if (!reader.ended()) return false;
    std::string reason;
    for (const auto& [key, value] : pairs) {
      if (reason.empty()) reason = put(std::string(key), value);
    }
    return confirm(id, connection, reason);
  }

  bool append(uint64_t id, StoreConnection& connection, StoreReader& reader) {
    const std::string key(reader.text());
    const std::string_view value = reader.text();
    if (!reader.ended()) return false;
    const auto found = values_.find(key);
    std::string whole = found == values_.end() ? "" : found->second;
    whole += value;
    return confirm(id, connection, put(key, whole));
  }

  bool replace(uint64_t id, StoreConnection& connection, StoreReader& reader) {
    const std::string key(reader.text());
    const std::string_view expected = reader.text();
    const std::string_view wanted = reader.text();
    if (!reader.ended()) return false;
    const auto found = values_.find(key);
    const bool there = found != values_.end();
    if (there ? found->second != expected : !expected.empty()) {
      return answer(
          id, connection,
          StoreWriter(StoreAnswer::done)
              .text(there ? std::string_view(found->second) : expected));
    }
    const std::string reason = put(key, wanted);
    if (!reason.empty()) return confirm(id, connection, reason);
    return answer(id, connection, StoreWriter(StoreAnswer::done).text(wanted));
  }

  bool add(uint64_t id, StoreConnection& connection, StoreReader& reader) {
    const std::string key(reader.text());
    int64_t sum = reader.number();
    if (!reader.ended()) return false;
    if (const auto found = values_.find(key); found != values_.end()) {
      const std::string& old = found->second;
      int64_t value = 0;
      const auto [end, error] =
          std::from_chars(old.data(), old.data() + old.size(), value);
      if (error != std::errc() || end != old.data() + old.size() ||
          __builtin_add_overflow(sum, value, &sum)) {
        return confirm(
            id, connection, "the value is no number, or its sum too large");
      }
    }
    const std::string reason = put(key, std::to_string(sum));
    if (!reason.empty()) return confirm(id, connection, reason);
    return answer_number(id, connection, sum);
  }

  bool wait(
      uint64_t id, StoreConnection& connection, StoreReader& reader,
      bool values) {
    const int64_t milliseconds = reader.number();
    auto keys = read_keys(reader);
    if (!keys || milliseconds < 0) return false;
    connection.waits = StoreWait{std::move(*keys), 0, values};
    if (milliseconds > 0) {
      constexpr int64_t kLongest = int64_t{1000} * 60 * 60 * 24 * 365;
      set_deadline(
          id, connection,
          ServerClock::now() +
              std::chrono::milliseconds(std::min(milliseconds, kLongest)));
    }
    return go_on(id, connection);
  }

  static std::optional<std::vector<std::string>>
  read_keys(StoreReader& reader) {
    std::vector<std::string> keys;
    const int64_t count = reader.number();
    for (int64_t i = 0; i < count && reader.ok(); ++i) {
      keys.emplace_back(reader.text());
    }
    if (!reader.ended()) return std::nullopt;
    return keys;
  }

  // Why a value is refused; empty when it was stored.
  std::string put(const std::string& key, std::string_view value) {
    if (key.size() > limits_.key) {
      return format(
          "the key has {} bytes, and {} are allowed", key.size(), limits_.key);
    }
    if (value.size() > limits_.value) {
      return format(
          "the value has {} bytes, and {} are allowed", value.size(),
          limits_.value);
    }
    const auto found = values_.find(key);
    const size_t before =
        found == values_.end() ? 0 : key.size() + found->second.size();
    const size_t after = total_ - before + key.size() + value.size();
    if (after > limits_.total) {
      return format(
          "the store has {} bytes, and {} are allowed", total_, limits_.total);
    }
    total_ = after;
    if (found != values_.end()) {
      found->second.assign(value);
      return "";
    }
    values_.emplace(key, value);
    wake(key);
    return "";
  }

  bool erase(const std::string& key) {
    const auto found = values_.find(key);
    if (found == values_.end()) return false;
    total_ -= key.size() + found->second.size();
    values_.erase(found);
    return true;
  }

  void wake(const std::string& key) {
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    const auto ids = std::move(found->second);
    waiting_.erase(found);
    for (const uint64_t id : ids) {
      if (!go_on(id, connections_.at(id))) drop(id);
    }
  }

  // Answers a waiting call when all its keys are there.
  bool go_on(uint64_t id, StoreConnection& connection) {
    StoreWait& wait = *connection.waits;
    const auto missing = std::find_if(
        wait.keys.begin() + static_cast<ptrdiff_t>(wait.next), wait.keys.end(),
        [&](const auto& key) { return !values_.contains(key); });
    wait.next = static_cast<size_t>(missing - wait.keys.begin());
    if (missing != wait.keys.end()) {
      waiting_[*missing].push_back(id);
      return true;
    }
    StoreWriter writer(StoreAnswer::done);
    if (wait.values) {
      for (const auto& key : wait.keys) {
        const auto found = values_.find(key);
        if (found == values_.end()) {
          wait.next = 0;  // it was removed while others came
          return go_on(id, connection);
        }
        writer.text(found->second);
        if (writer.size() > kMaxStoreMessage) {
          writer = StoreWriter(StoreAnswer::refused);
          writer.text(format(
              "the values have more than {} bytes together", kMaxStoreMessage));
          break;
        }
      }
    }
    connection.waits.reset();
    set_deadline(id, connection, std::nullopt);
    return answer(id, connection, std::move(writer));
  }

  void forget_wait(uint64_t id, StoreConnection& connection) {
    const auto found =
        waiting_.find(connection.waits->keys[connection.waits->next]);
    std::erase(found->second, id);
    if (found->second.empty()) waiting_.erase(found);
    connection.waits.reset();
  }

  bool
  confirm(uint64_t id, StoreConnection& connection, const std::string& reason) {
    return answer(
        id, connection,
        reason.empty() ? StoreWriter(StoreAnswer::done)
                       : StoreWriter(StoreAnswer::refused).text(reason));
  }

  bool answer_number(uint64_t id, StoreConnection& connection, int64_t number) {
    return answer(
        id, connection, StoreWriter(StoreAnswer::done).number(number));
  }

  bool answer(uint64_t id, StoreConnection& connection, StoreWriter writer) {
    connection.output = writer.take();
    return flush(id, connection, /*first=*/true);
  }

  bool flush(uint64_t id, StoreConnection& connection, bool first = false) {
    std::string& output = connection.output;
    const ssize_t size = connection.channel.send(output.data(), output.size());
    if (size < 0 && errno != EAGAIN && errno != EINTR) return false;
    output.erase(0, static_cast<size_t>(std::max<ssize_t>(size, 0)));
    const bool all = output.empty();
    if (all) release(output);
    if (all != first) {
      watch(EPOLL_CTL_MOD, connection.fd(), all ? EPOLLIN : EPOLLOUT, id);
    }
    return true;
  }

  void refuse(uint64_t id, const std::string& reason) {
    told_.tell(connections_.at(id).fd(), reason);
    drop(id);
  }

  void drop(uint64_t id) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    StoreConnection& connection = found->second;
    set_deadline(id, connection, std::nullopt);
    if (connection.waits) forget_wait(id, connection);
    strangers_.erase(id);
    connections_.erase(found);
  }

  void set_deadline(
      uint64_t id, StoreConnection& connection,
      std::optional<ServerClock::time_point> deadline) {
    if (connection.deadline) deadlines_.erase({*connection.deadline, id});
    connection.deadline = deadline;
    if (deadline) deadlines_.emplace(*deadline, id);
  }

  void close_all() {
    connections_.clear();
    for (const int fd : {listener_, poll_, stop_}) {
      if (fd >= 0) close(fd);
    }
  }

  const int listener_;
  const authentication::Key key_;
  const StoreLimits limits_;
  const int poll_;
  const int stop_;
  uint64_t next_id_ = 2;
  std::unordered_map<uint64_t, StoreConnection> connections_;
  std::set<uint64_t> strangers_;  // in the order in which they came
  std::set<std::pair<ServerClock::time_point, uint64_t>> deadlines_;
  std::optional<ServerClock::time_point> resume_;  // accepting
  std::unordered_map<std::string, std::string> values_;
  size_t total_ = 0;  // bytes of keys and values
  // By the first key that is missing.
  std::unordered_map<std::string, std::vector<uint64_t>> waiting_;
  authentication::Strangers told_;
  std::thread thread_;
};

StoreServer::StoreServer(
    int listener, const authentication::Key& key, StoreLimits limits)
    : loop_(std::make_unique<Loop>(listener, key, limits)) {}

StoreServer::~StoreServer() = default;

}  // namespace echelon
