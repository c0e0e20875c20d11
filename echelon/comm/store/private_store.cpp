#include "echelon/comm/store/private_store.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "echelon/authentication/channel.h"
#include "echelon/authentication/connect.h"
#include "echelon/authentication/handshake.h"
#include "echelon/comm/store/store_messages.h"
#include "echelon/error.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using StoreClock = std::chrono::steady_clock;
using StoreBytes = std::vector<uint8_t>;

constexpr std::chrono::milliseconds kConnect{2000};  // for one attempt

std::string_view view(const StoreBytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

StoreBytes bytes_of(std::string_view text) {
  return {text.begin(), text.end()};
}

std::string name_of(const StorePlace& place) {
  return format("{}:{}", place.address, place.port);
}

// One attempt; not open when nobody listens.
FileDescriptor connect_once(const addrinfo& target) {
  FileDescriptor link = authentication::connect_within(target, kConnect);
  if (!link.is_open()) return link;
  const int yes = 1;
  ::setsockopt(link.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  const int flags = ::fcntl(link.fd(), F_GETFL);
  ::fcntl(link.fd(), F_SETFL, flags & ~O_NONBLOCK);
  return link;
}

FileDescriptor
connect_link(const StorePlace& place, std::chrono::milliseconds timeout) {
  using authentication::State;
  const auto deadline = StoreClock::now() + timeout;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(
      place.address.c_str(), std::to_string(place.port).c_str(), &hints,
      &found);
  if (failure != 0) {
    throw ConfigError(format(
        "store: MASTER_ADDR={} cannot be resolved to an address: {}",
        place.address, ::gai_strerror(failure)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> targets(
      found, ::freeaddrinfo);
  // Rank 0 is usually a few milliseconds late.
  for (std::chrono::milliseconds pause{2};;
       pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    for (const addrinfo* target = targets.get(); target != nullptr;
         target = target->ai_next) {
      FileDescriptor link = connect_once(*target);
      if (!link.is_open()) continue;
      switch (authentication::prove(
          link.fd(), place.key, authentication::Port::store, deadline)) {
        case State::proved:
          return link;
        case State::other_program:
          throw CommError(format(
              "what listens at {} is not the store of this job; set "
              "MASTER_PORT to a free port",
              name_of(place)));
        case State::other_key:
          throw CommError(format(
              "the store at {} has not this job's key: it is of another job; "
              "set MASTER_PORT to a free port",
              name_of(place)));
        case State::open:
        case State::closed:
          break;
      }
    }
    if (StoreClock::now() >= deadline) {
      throw CommError(format(
          "nobody serves the store at {} within {} s", name_of(place),
          timeout.count() / 1000));
    }
    std::this_thread::sleep_for(pause);
  }
}

class PrivateStore : public c10d::Store {
 public:
  PrivateStore(
      StorePlace place, std::chrono::milliseconds timeout,
      std::shared_ptr<StoreServer> server)
      : Store(timeout),
        place_(std::move(place)),
        server_(std::move(server)),
        link_(
            connect_link(place_, timeout), place_.key,
            authentication::Handshake::End::client) {}

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<PrivateStore>(place_, timeout_, server_);
  }
  void set(const std::string& key, const StoreBytes& value) override {
    multiSet({key}, {value});
  }
  void multiSet(
      const std::vector<std::string>& keys,
      const std::vector<StoreBytes>& values) override {
    TORCH_CHECK(
        keys.size() == values.size(), "multiSet: ", keys.size(), " keys, but ",
        values.size(), " values");
    StoreWriter writer = call(StoreCall::set, keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      writer.text(keys[i]).text(view(values[i]));
    }
    ask(std::move(writer), keys);
  }
  void append(const std::string& key, const StoreBytes& value) override {
    ask(StoreWriter(StoreCall::append).text(key).text(view(value)), {key});
  }
  StoreBytes compareSet(
      const std::string& key, const StoreBytes& current,
      const StoreBytes& value) override {
    const std::string answer =
        ask(StoreWriter(StoreCall::replace)
                .text(key)
                .text(view(current))
                .text(view(value)),
            {key});
    return bytes_of(StoreReader(answer).text());
  }
  StoreBytes get(const std::string& key) override {
    return std::move(multiGet({key})[0]);
  }
  std::vector<StoreBytes>
  multiGet(const std::vector<std::string>& keys) override {
    const std::string answer =
        ask(waiting(StoreCall::get, keys, timeout_), keys);
    StoreReader reader(answer);
    std::vector<StoreBytes> values;
    for (size_t i = 0; i < keys.size(); ++i) {
      values.push_back(bytes_of(reader.text()));
    }
    return values;
  }
  int64_t add(const std::string& key, int64_t value) override {
    return number(
        ask(StoreWriter(StoreCall::add).text(key).number(value), {key}));
  }
  bool deleteKey(const std::string& key) override {
    return number(ask(StoreWriter(StoreCall::remove).text(key), {key})) != 0;
  }
  bool check(const std::vector<std::string>& keys) override {
    StoreWriter writer = call(StoreCall::check, keys.size());
    for (const auto& key : keys) writer.text(key);
    return number(ask(std::move(writer), keys)) != 0;
  }
  int64_t getNumKeys() override {
    return number(ask(StoreWriter(StoreCall::count), {}));
  }
  void wait(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
  }
  void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) override {
    ask(waiting(StoreCall::wait, keys, timeout), keys);
  }
  bool hasExtendedApi() const override { return true; }

 private:
  static StoreWriter call(StoreCall call, size_t count) {
    return std::move(StoreWriter(call).number(static_cast<int64_t>(count)));
  }
  static StoreWriter waiting(
      StoreCall call, const std::vector<std::string>& keys,
      std::chrono::milliseconds timeout) {
    StoreWriter writer(call);
    writer.number(timeout.count()).number(static_cast<int64_t>(keys.size()));
    for (const auto& key : keys) writer.text(key);
    return writer;
  }
  static int64_t number(const std::string& answer) {
    return StoreReader(answer).number();
  }

  // Sends a call and returns what comes with the answer.
  std::string ask(StoreWriter request, const std::vector<std::string>& keys) {
    const std::string first = keys.empty() ? "" : keys[0];
    if (request.size() > kMaxStoreMessage) {
      throw CommError(format(
          "the store at {}: \"{}\": {} bytes, and {} are allowed in one call",
          name_of(place_), first, request.size(), kMaxStoreMessage));
    }
    const std::lock_guard lock(mutex_);
    send_all(request.take());
    uint32_t size = 0;
    receive_all(&size, sizeof size);
    if (size == 0 || size > 2 * kMaxStoreMessage) lose(EBADMSG);
    std::string answer(size, '\0');
    receive_all(answer.data(), size);
    StoreReader reader(answer);
    const auto kind = static_cast<StoreAnswer>(reader.kind());
    if (kind == StoreAnswer::done) return answer.substr(1);
    if (kind == StoreAnswer::late) {
      C10_THROW_ERROR(
          DistStoreError,
          format("the key \"{}\" did not come in time", reader.text()));
    }
    throw CommError(format(
        "the store at {} refuses \"{}\": {}", name_of(place_), first,
        reader.text()));
  }

  void send_all(const std::string& bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t size = link_.send(bytes.data() + sent, bytes.size() - sent);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) lose(errno);
      sent += static_cast<size_t>(size);
    }
  }

  void receive_all(void* to, size_t wanted) {
    auto* bytes = static_cast<char*>(to);
    while (wanted > 0) {
      const ssize_t size = link_.receive(bytes, wanted);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) lose(size == 0 ? ECONNRESET : errno);
      bytes += size;
      wanted -= static_cast<size_t>(size);
    }
  }

  // No later call may read what was left of this one.
  [[noreturn]] void lose(int error) {
    link_.close();
    C10_THROW_ERROR(
        DistNetworkError, format(
                              "the connection to the store at {} was lost: {}",
                              name_of(place_), std::strerror(error)));
  }

  const StorePlace place_;
  const std::shared_ptr<StoreServer> server_;
  std::mutex mutex_;
  authentication::Channel link_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_private_store(
    const StorePlace& place, std::chrono::milliseconds timeout,
    std::shared_ptr<StoreServer> server) {
  return c10::make_intrusive<PrivateStore>(place, timeout, std::move(server));
}

}  // namespace echelon
