// A thread for each connection: they are as many as the ranks of the job at
// most, and wait for their memory or the network. The index of the slots is
// read anew for each request, since the launcher may add some.
//
// Copies are files of the server, which it lists in an index of its own. As
// with slots, the record is emptied before the copy changes. A host that is
// lost leaves its copies behind, and they are what the others go on from. They
// are dropped when a host has sent two copies of a later generation: the first
// of them is then complete.
#include "echelon/checkpoint/memory/memory_server.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>

#include "echelon/authentication/connect.h"
#include "echelon/authentication/handshake.h"
#include "echelon/checkpoint/memory/memory_index.h"
#include "echelon/checkpoint/memory/memory_link.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using memory_slots::Index;
using memory_slots::MemoryFile;
using memory_slots::MemoryLink;
using memory_slots::Record;
using memory_slots::SlotPlace;

constexpr std::chrono::seconds kProof{2};
// Of connections that have proved nothing: the oldest is closed to make room.
constexpr size_t kMostStrangers = 256;
constexpr int kMostLinks = 4096;
constexpr int64_t kLargest = int64_t{1} << 44;

class Service {
 public:
  Service(std::string index, std::string copies, authentication::Key key)
      : index_(std::move(index)), copies_(std::move(copies)), key_(key) {}

  /// Serves whoever connects, for ever.
  [[noreturn]] void run(int listener) {
    for (;;) {
      const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) {
        // Out of files, say: others may close theirs.
        if (errno != EINTR) poll(nullptr, 0, 50);
        continue;
      }
      FileDescriptor socket(fd);
      if (links_ >= kMostLinks) continue;
      const std::lock_guard lock(strangers_mutex_);
      // Its thread sees the end and closes it.
      if (strangers_.size() >= kMostStrangers) {
        ::shutdown(strangers_.front(), SHUT_RDWR);
        strangers_.pop_front();
      }
      try {
        std::thread([this, fd] { serve(fd); }).detach();
        strangers_.push_back(socket.release());
      } catch (const std::system_error&) {
        // No thread is left for it.
      }
    }
  }

 private:
  /// Of another host.
  struct Copy {
    std::string host;
    int number = 0;
    int side = 0;
    int64_t generation = -1;  // of what it holds; -1: nothing
    std::array<std::unique_ptr<MemoryFile>, 2> files;
    std::mutex writing;
  };

  void serve(int fd) {
    FileDescriptor socket(fd);
    const bool proved = proves(socket.fd());
    {
      const std::lock_guard lock(strangers_mutex_);
      std::erase(strangers_, socket.fd());
      if (!proved) return socket.close();
    }
    ++links_;
    try {
      MemoryLink link(std::move(socket), key_);
      while (link.wait()) take(link);
    } catch (const std::exception&) {
      // The other end notices by itself.
    }
    --links_;
  }

  bool proves(int fd) const {
    using authentication::Handshake;
    using authentication::State;
    Handshake handshake(
        key_, authentication::Port::memory, Handshake::End::server);
    const auto deadline = std::chrono::steady_clock::now() + kProof;
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0) return false;
      pollfd file{fd, POLLIN, 0};
      poll(&file, 1, static_cast<int>(left.count()));
      if (file.revents == 0) continue;
      const State state = handshake.advance(fd);
      if (state != State::open) return state == State::proved;
    }
  }

  void take(MemoryLink& link) {
    std::istringstream words(link.receive_line());
    std::string verb;
    SlotPlace wanted;
    words >> verb >> wanted.host >> wanted.number >> wanted.side;
    int64_t first = 0;
    int64_t second = 0;
    int64_t third = 0;
    if (verb == "write") {
      words >> first >> second >> third;
      const bool sensible = words && second >= 0 && second <= kLargest &&
                            third > 0 && third <= kLargest;
      if (!sensible) return refuse(link, "a write that makes no sense");
      return write(link, wanted, first, second, third);
    }
    const auto slot = find(wanted);
    if (!slot) return refuse(link, "it has no such slot");
    if (verb == "record") return send(link, slot->record, 0, -1);
    if (verb == "size") return send(link, slot->file, 0, 0);
    words >> first >> second;
    const bool sensible = verb == "read" && words && first >= 0 && second > 0 &&
                          second <= kLargest;
    if (!sensible) return refuse(link, "a request that it does not know");
    send(link, slot->file, first, second);
  }

  std::optional<SlotPlace> find(const SlotPlace& wanted) const {
    for (SlotPlace& slot : Index::read(index_).slots) {
      if (slot.host == wanted.host && slot.number == wanted.number &&
          slot.side == wanted.side) {
        return std::move(slot);
      }
    }
    return std::nullopt;
  }

  static void refuse(MemoryLink& link, const std::string& reason) {
    link.send("error " + reason + "\n");
  }

  /// -1: all bytes from `offset` on; 0: only how many there are.
  static void send(
      MemoryLink& link, const std::string& path, int64_t offset,
      int64_t bytes) {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status = {};
    if (!file.is_open() || ::fstat(file.fd(), &status) != 0) {
      return refuse(link, std::strerror(errno));
    }
    const int64_t size = status.st_size;
    if (bytes == 0) return link.send(format("ok {}\n", size));
    if (bytes < 0) bytes = size - offset;
    if (offset + bytes > size) {
      return refuse(link, format("the file ends at byte {}", size));
    }
    link.send(format("ok {}\n", bytes));
    link.send_file(file.fd(), offset, bytes);
  }

  void write(
      MemoryLink& link, const SlotPlace& place, int64_t generation,
      int64_t bytes, int64_t record_bytes) {
    const auto copy = copy_of(place);
    const std::lock_guard writing(copy->writing);
    copy->generation = -1;
    memory_slots::write_over(copy->files[1]->path(), "");
    {
      const FileDescriptor file(::open(
          copy->files[0]->path().c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
      link.receive_file(file.fd(), bytes);
    }
    std::string record(static_cast<size_t>(record_bytes), '\0');
    link.receive(std::as_writable_bytes(std::span(record)));
    memory_slots::write_over(copy->files[1]->path(), record);
    {
      const std::lock_guard lock(mutex_);
      copy->generation = generation;
    }
    drop_older(*copy);
    link.send("ok 0\n");
  }

  std::shared_ptr<Copy> copy_of(const SlotPlace& place) {
    const std::lock_guard lock(mutex_);
    for (const auto& copy : all_) {
      if (copy->host == place.host && copy->number == place.number &&
          copy->side == place.side) {
        return copy;
      }
    }
    auto added = std::make_shared<Copy>();
    added->host = place.host;
    added->number = place.number;
    added->side = place.side;
    added->files = memory_slots::make_slot(static_cast<size_t>(place.number));
    all_.push_back(added);
    list();
    return added;
  }

  void drop_older(const Copy& newest) {
    const std::lock_guard lock(mutex_);
    int sides = 0;
    for (const auto& copy : all_) {
      sides += copy->host == newest.host && copy->number == newest.number &&
                       copy->generation == newest.generation
                   ? 1
                   : 0;
    }
    if (sides < 2) return;
    const size_t before = all_.size();
    std::erase_if(all_, [&](const auto& copy) {
      return copy->generation >= 0 && copy->generation < newest.generation;
    });
    if (all_.size() != before) list();
  }

  void list() const {
    std::string text;
    for (const auto& copy : all_) {
      text += format(
          "copy {} {} {} {} {}\n", copy->host, copy->number, copy->side,
          copy->files[0]->path(), copy->files[1]->path());
    }
    memory_slots::write_over(copies_, text);
  }

  const std::string index_;
  const std::string copies_;
  const authentication::Key key_;
  std::mutex strangers_mutex_;
  std::list<int> strangers_;  // the oldest first
  std::atomic<int> links_ = 0;
  std::mutex mutex_;  // of what follows, and the copies' generations
  std::list<std::shared_ptr<Copy>> all_;
};

/// Listens on a free port, which it adds.
FileDescriptor listen_at(const std::string& address, int& port) {
  const auto found = authentication::numeric_address(address, 0);
  if (!found) return FileDescriptor();
  FileDescriptor socket(
      ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  char name[NI_MAXSERV] = "0";
  const bool fine =
      bind(socket.fd(), found->ai_addr, found->ai_addrlen) == 0 &&
      listen(socket.fd(), 1024) == 0 &&
      getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&bound), &size) ==
          0 &&
      getnameinfo(
          reinterpret_cast<sockaddr*>(&bound), size, nullptr, 0, name,
          sizeof name, NI_NUMERICSERV) == 0;
  port = std::atoi(name);
  return fine ? std::move(socket) : FileDescriptor();
}

/// Closes all files above 2 but one: what the launcher has open is not the
/// server's.
void keep_only(int kept) {
  if (kept > 3) close_range(3, static_cast<unsigned>(kept) - 1, 0);
  close_range(static_cast<unsigned>(kept) + 1, ~0U, 0);
}

}  // namespace

MemoryServer::MemoryServer(
    MemorySlots& slots, const std::string& address,
    const authentication::Key& key) {
  const auto refuse = [&] {
    throw ConfigError(format(
        "[elastic] memory: no server for other hosts on {}: {}; memory = "
        "\"off\" needs none",
        address, std::strerror(errno)));
  };
  int port = 0;
  const FileDescriptor listener = listen_at(address, port);
  if (!listener.is_open()) refuse();
  const std::string copies = slots.begin_copies();
  memory_slots::write_over(copies, "");  // those of a server before are gone
  const pid_t launcher = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) refuse();
  if (pid_ == 0) {
    setpgid(0, 0);  // a terminal's Ctrl-C is not for it
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "echelon-memory");
    if (::getppid() != launcher) _exit(0);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, nullptr);
    const int null = ::open("/dev/null", O_RDWR);
    for (int fd = 0; fd <= 2; ++fd) dup2(null, fd);
    keep_only(listener.fd());
    Service(slots.path(), copies, key).run(listener.fd());
  }
  slots.serve_at(address, port, key.to_hex());
}

MemoryServer::~MemoryServer() {
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace echelon
