// The processes of one host come to share a memory file without leaving a name
// anywhere. Rank 0 listens on an abstract socket whose name the kernel chooses
// (it vanishes with the process), publishes the name through the store, checks
// who connects, and hands out the file's descriptor. The connections stay open,
// so that each closes when its process ends.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "echelon/comm/shared_memory/arena.h"
#include "echelon/comm/shared_memory/attachment.h"
#include "echelon/comm/shared_memory/failure.h"
#include "echelon/comm/shared_memory/host.h"
#include "echelon/comm/shared_memory/monitor.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMagic = 0x65636c31;
constexpr int kMaxDescriptors = 250;  // the kernel takes 253 in one message

struct Hello {
  uint32_t magic = kMagic;
  int32_t rank = 0;
  int32_t size = 0;
  int32_t shares = 0;
  int64_t pid = 0;
  uint64_t pid_namespace = 0;
  char nonce[16] = {};
  char job_key[256] = {};
};

struct Welcome {
  uint32_t magic = kMagic;
  int32_t accepted = 0;
  int32_t num_missing = 0;
  int32_t missing[64] = {};
  char text[1024] = {};
};

[[noreturn]] void fail(const std::string& what) {
  throw CommError(format("[local] {}: {}", what, std::strerror(errno)));
}

bool send_message(
    int socket, const void* data, size_t bytes,
    const std::vector<int>& descriptors) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(
        CMSG_DATA(header), descriptors.data(),
        descriptors.size() * sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

bool receive_message(
    int socket, void* data, size_t bytes,
    std::vector<FileDescriptor>& descriptors) {
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(kMaxDescriptors * sizeof(int)));
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); got >= 0 && header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t num = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < num; ++i) {
      int descriptor;
      std::memcpy(
          &descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      descriptors.emplace_back(descriptor);
    }
  }
  return got == static_cast<ssize_t>(bytes);
}

// True when there is something to read, or the other end is gone, before the
// deadline.
bool readable(int socket, Clock::time_point deadline) {
  pollfd polled{socket, POLLIN, 0};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now());
    const int result =
        poll(&polled, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (result > 0) {
      return true;
    }
    if (result == 0 || errno != EINTR) {
      return false;
    }
  }
}

std::string hex(const char* data, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    text += format("{:02x}", static_cast<unsigned char>(data[i]));
  }
  return text;
}

std::string unhex(const std::string& text) {
  std::string data;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    data += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  }
  return data;
}

uint64_t pid_namespace() {
  struct stat info {};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

struct Joined {
  std::shared_ptr<Segment> segment;
  std::vector<PeerSocket> sockets;
  std::vector<FileDescriptor> arenas;  // by rank; empty: none
};

class Joining {
 public:
  Joining(
      const Rendezvous& rendezvous, const std::string& job_key, int rank,
      int size, const JoinOptions& options)
      : rendezvous_(rendezvous),
        key_("echelon/local/" + job_key),
        rank_(rank),
        size_(size),
        options_(options),
        deadline_(Clock::now() + options.timeout) {
    hello_.rank = rank;
    hello_.size = size;
    hello_.shares = options.share_tensors;
    hello_.pid = getpid();
    hello_.pid_namespace = pid_namespace();
    std::strncpy(hello_.job_key, job_key.c_str(), sizeof(hello_.job_key) - 1);
  }

  Joined lead() {
    Joined joined;
    joined.segment = Segment::create(size_);
    FileDescriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t length = sizeof(sa_family_t);  // the kernel chooses the name
    if (listener.fd() < 0 ||
        bind(listener.fd(), reinterpret_cast<sockaddr*>(&address), length) !=
            0 ||
        listen(listener.fd(), size_) != 0) {
      fail("cannot listen for the ranks of this host");
    }
    length = sizeof(address);
    getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length);
    if (getrandom(hello_.nonce, sizeof(hello_.nonce), 0) !=
        sizeof(hello_.nonce)) {
      fail("no random numbers");
    }
    rendezvous_.set(
        key_, hex(address.sun_path, length - offsetof(sockaddr_un, sun_path)) +
                  ":" + hex(hello_.nonce, sizeof(hello_.nonce)));
    accept_all(listener.fd(), joined);
    return joined;
  }

  // What every rank but 0 does: reads the socket's name and the nonce from the
  // store, connects, says who it is (and passes its arena), and waits for rank
  // 0's answer with the memory file and all arenas.
  Joined follow() {
    std::string told;
    try {
      told = rendezvous_.get(key_, options_.timeout);
    } catch (const std::exception& error) {
      throw Timeout(
          format(
              "[local] rank {}: rank 0 did not come to this host's rendezvous "
              "within {} ms ({})",
              rank_, options_.timeout.count(), error.what()),
          0, {0});
    }
    const size_t colon = told.find(':');
    const std::string name = unhex(told.substr(0, colon));
    const std::string nonce = unhex(told.substr(colon + 1));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(
        address.sun_path, name.data(),
        std::min(name.size(), sizeof(address.sun_path)));
    std::memcpy(
        hello_.nonce, nonce.data(),
        std::min(nonce.size(), sizeof(hello_.nonce)));
    FileDescriptor socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (connect(
            socket_.fd(), reinterpret_cast<sockaddr*>(&address),
            static_cast<socklen_t>(
                offsetof(sockaddr_un, sun_path) + name.size())) != 0) {
      fail(format(
          "rank {} cannot reach rank 0's socket; the local backend needs all "
          "ranks on one host and in one network namespace, and rank 0 alive",
          rank_));
    }
    std::vector<int> mine;
    if (options_.share_tensors) {
      mine.push_back(Arena::of_process().descriptor());
    }
    Welcome welcome;
    Joined joined;
    if (!send_message(socket_.fd(), &hello_, sizeof(hello_), mine)) {
      fail("rank 0 hung up");
    }
    // Rank 0 gives up at its own deadline and says so.
    const auto patience = deadline_ + std::chrono::seconds(5);
    if (!readable(socket_.fd(), patience) ||
        !receive_message(
            socket_.fd(), &welcome, sizeof(welcome), joined.arenas) ||
        welcome.magic != kMagic) {
      throw Timeout(
          format(
              "[local] rank {}: rank 0 hung up or did not answer during the "
              "rendezvous of this host's ranks",
              rank_),
          0, {0});
    }
    if (!welcome.accepted) {
      const std::string text(
          welcome.text, strnlen(welcome.text, sizeof(welcome.text)));
      if (welcome.num_missing == 0) {
        throw ConfigError(text);
      }
      throw Timeout(
          text, 0,
          {welcome.missing,
           welcome.missing + std::min(welcome.num_missing, 64)});
    }
    if (joined.arenas.empty()) {
      throw CommError("[local] rank 0 sent no memory");
    }
    joined.segment = Segment::attach(joined.arenas[0].release());
    joined.arenas.erase(joined.arenas.begin());
    joined.sockets.push_back({0, socket_.release()});
    return joined;
  }

 private:
  void refuse(int socket, const std::string& why) {
    Welcome welcome;
    std::strncpy(welcome.text, why.c_str(), sizeof(welcome.text) - 1);
    send_message(socket, &welcome, sizeof(welcome), {});
  }

  // Returns why the newcomer is refused; empty when it belongs to this job.
  std::string objection(
      int socket, const Hello& hello,
      const std::vector<FileDescriptor>& peers) {
    ucred who{};
    socklen_t length = sizeof(who);
    getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length);
    const std::string rank = format("[local] rank {}", hello.rank);
    if (hello.magic != kMagic || who.uid != getuid() ||
        std::memcmp(hello.nonce, hello_.nonce, sizeof(hello.nonce)) != 0 ||
        std::strncmp(hello.job_key, hello_.job_key, sizeof(hello.job_key)) !=
            0) {
      return format(
          "{} (pid {}) belongs to another job or an earlier generation of this "
          "one",
          rank, who.pid);
    }
    if (hello.size != size_ || hello.rank <= 0 || hello.rank >= size_) {
      return format(
          "{} of {} meets rank 0 of {} on this host", rank, hello.size, size_);
    }
    if (peers[hello.rank].fd() >= 0) {
      return format("{} is here twice; the newcomer has pid {}", rank, who.pid);
    }
    if (hello.shares != hello_.shares) {
      return format(
          "{} joins with share_tensors = {}, rank 0 with the opposite", rank,
          hello.shares ? "true" : "false");
    }
    return "";
  }

  static void present(Joined& joined, const Hello& hello) {
    auto& block = joined.segment->rank(hello.rank);
    block.pid.store(hello.pid);
    block.pid_namespace.store(hello.pid_namespace);
  }

  // Accepts connections until every rank has come, refusing strangers; then
  // welcomes all at once, so no rank goes on without the others.
  void accept_all(int listener, Joined& joined) {
    std::vector<FileDescriptor> peers(size_);
    present(joined, hello_);
    joined.arenas.resize(options_.share_tensors ? size_ : 0);
    if (options_.share_tensors) {
      joined.arenas[0] = FileDescriptor(
          fcntl(Arena::of_process().descriptor(), F_DUPFD_CLOEXEC, 0));
    }
    for (int left = size_ - 1; left > 0;) {
      if (!readable(listener, deadline_)) {
        give_up(peers);
      }
      FileDescriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      Hello hello;
      std::vector<FileDescriptor> received;
      // A stranger that connects and says nothing delays us this long at most.
      const auto patience =
          std::min(deadline_, Clock::now() + std::chrono::seconds(5));
      if (peer.fd() < 0 || !readable(peer.fd(), patience) ||
          !receive_message(peer.fd(), &hello, sizeof(hello), received)) {
        continue;
      }
      const std::string why = objection(peer.fd(), hello, peers);
      if (!why.empty()) {
        refuse(peer.fd(), why);
        continue;
      }
      if (options_.share_tensors) {
        if (received.empty()) {
          continue;
        }
        joined.arenas[hello.rank] = std::move(received[0]);
      }
      present(joined, hello);
      peers[hello.rank] = std::move(peer);
      --left;
    }
    Welcome welcome;
    welcome.accepted = 1;
    std::vector<int> descriptors = {joined.segment->descriptor()};
    for (const auto& arena : joined.arenas) {
      descriptors.push_back(arena.fd());
    }
    for (int r = 1; r < size_; ++r) {
      // The monitor notices a peer that died meanwhile.
      send_message(peers[r].fd(), &welcome, sizeof(welcome), descriptors);
      joined.sockets.push_back({r, peers[r].release()});
    }
  }

  [[noreturn]] void give_up(const std::vector<FileDescriptor>& peers) {
    std::vector<int> missing;
    for (int r = 1; r < size_; ++r) {
      if (peers[r].fd() < 0) {
        missing.push_back(r);
      }
    }
    const std::string text = format(
        "[local] not all ranks of this host came within {} ms; missing: rank "
        "{}",
        options_.timeout.count(), join(missing, ", "));
    Welcome welcome;
    welcome.num_missing = static_cast<int32_t>(missing.size());
    std::copy_n(
        missing.begin(), std::min<size_t>(missing.size(), 64), welcome.missing);
    std::strncpy(welcome.text, text.c_str(), sizeof(welcome.text) - 1);
    for (const auto& peer : peers) {
      if (peer.fd() >= 0) {
        send_message(peer.fd(), &welcome, sizeof(welcome), {});
      }
    }
    throw Timeout(text, 0, missing);
  }

  const Rendezvous& rendezvous_;
  std::string key_;
  int rank_;
  int size_;
  JoinOptions options_;
  Clock::time_point deadline_;
  Hello hello_;
};

std::vector<MappedArena>
map_arenas(const std::vector<FileDescriptor>& descriptors, int rank) {
  std::vector<MappedArena> arenas;
  for (size_t r = 0; r < descriptors.size(); ++r) {
    if (static_cast<int>(r) == rank) {
      auto& own = Arena::of_process();
      arenas.push_back({own.base(), own.bytes()});
      continue;
    }
    struct stat info {};
    fstat(descriptors[r].fd(), &info);
    const auto bytes = static_cast<size_t>(info.st_size);
    void* base = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
        descriptors[r].fd(), 0);
    if (base == MAP_FAILED) {
      fail("cannot map the tensors of rank " + std::to_string(r));
    }
    madvise(base, bytes, MADV_DONTFORK);
    arenas.push_back({static_cast<char*>(base), bytes});
  }
  return arenas;
}

}  // namespace

std::shared_ptr<Host> join_processes(
    const Rendezvous& rendezvous, const std::string& job_key, int rank,
    int size, const JoinOptions& options) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw ConfigError(format(
        "[local] rank {} of {} on one host; 1 to {} ranks are possible", rank,
        size, kMaxRanks));
  }
  if (options.share_tensors && size >= kMaxDescriptors) {
    throw ConfigError(format(
        "[local] share_tensors with {} ranks on one host; fewer than {} are "
        "possible",
        size, kMaxDescriptors));
  }
  if (job_key.size() >= sizeof(Hello::job_key)) {
    throw ConfigError("[local] a job key of more than 255 characters");
  }
  if (!options.share_tensors) {
    keep_freed_memory();
  }
  Joining joining(rendezvous, job_key, rank, size, options);
  Joined joined = rank == 0 ? joining.lead() : joining.follow();
  auto host = std::make_shared<Attachment>(joined.segment, rank);
  host->separate(map_arenas(joined.arenas, rank));
  host->watch(watch_processes(joined.segment, rank, std::move(joined.sockets)));
  return host;
}

}  // namespace echelon::local
