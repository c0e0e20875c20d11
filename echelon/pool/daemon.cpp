// One thread: requests, ends of jobs and signals wake it. A request is a line
// of JSON, and so is its answer; the connection closes then.
#include "echelon/pool/daemon.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/error.h"
#include "echelon/pool/client.h"
#include "echelon/pool/pool.h"
#include "echelon/text/build_info.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

namespace echelon::pool {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// An environment and a command fit.
constexpr size_t kLongestRequest = 8 << 20;
constexpr std::chrono::seconds kPatience{30};  // with a client
constexpr size_t kMostClients = 256;

struct Client {
  FileDescriptor socket;
  Peer peer;
  std::string in;
  std::string out;
  size_t sent = 0;
  Clock::time_point began = Clock::now();
  bool answers = false;
  bool closed = false;
};

// Held as long as the daemon runs; the kernel lets go of it when it dies.
FileDescriptor lock(const fs::path& folder) {
  const fs::path path = folder / "lock";
  FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!file.is_open()) {
    throw ConfigError(format("{}: {}", path.string(), std::strerror(errno)));
  }
  if (::flock(file.fd(), LOCK_EX | LOCK_NB) != 0) {
    char other[32] = "";
    (void)!::read(file.fd(), other, sizeof other - 1);
    throw ConfigError(format(
        "{}: another daemon{}{} has this pool; `echelon pool status` asks it, "
        "and --folder names another pool",
        folder.string(), *other != '\0' ? ", process " : "", other));
  }
  const std::string text = std::to_string(::getpid());
  if (::ftruncate(file.fd(), 0) != 0 ||
      ::pwrite(file.fd(), text.data(), text.size(), 0) < 0) {
    // Only the message of another daemon needs it.
  }
  return file;
}

FileDescriptor listen_at(const fs::path& folder, const std::string& group) {
  const fs::path path = socket_of(folder);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.native().size() >= sizeof address.sun_path) {
    throw ConfigError(format(
        "{}: a socket's path has at most {} bytes; name a shorter --folder",
        path.string(), sizeof address.sun_path - 1));
  }
  std::memcpy(address.sun_path, path.c_str(), path.native().size());
  // The lock is ours: what is there was left by a daemon that died.
  ::unlink(path.c_str());
  FileDescriptor socket(
      ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const mode_t mask = ::umask(0177);
  const bool bound = ::bind(
                         socket.fd(), reinterpret_cast<sockaddr*>(&address),
                         sizeof address) == 0;
  const int error = errno;
  ::umask(mask);
  if (!bound) {
    throw ConfigError(format("{}: {}", path.string(), std::strerror(error)));
  }
  if (!group.empty()) {
    const ::group* entry = ::getgrnam(group.c_str());
    if (entry == nullptr) {
      throw ConfigError(format(
          "[pool] group = {}: there is no such group on this host",
          in_quotes(group)));
    }
    if (::chown(path.c_str(), static_cast<uid_t>(-1), entry->gr_gid) != 0 ||
        ::chmod(path.c_str(), 0660) != 0) {
      throw ConfigError(format(
          "[pool] group = {}: {}; only root and members of the group can give "
          "it the socket",
          in_quotes(group), std::strerror(errno)));
    }
  }
  if (::listen(socket.fd(), 128) != 0) {
    throw ConfigError(format("{}: {}", path.string(), std::strerror(errno)));
  }
  return socket;
}

FileDescriptor signal_file() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD}) {
    sigaddset(&set, signal);
  }
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  return FileDescriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

class Server {
 public:
  Server(Pool& pool, FileDescriptor listener, FileDescriptor signals)
      : pool_(pool),
        listener_(std::move(listener)),
        signals_(std::move(signals)) {}

  void run() {
    while (true) {
      auto wait = pool_.work();
      for (const Client& client : clients_) {
        if (!client.answers)
          wait = std::min(wait, std::chrono::milliseconds(500));
      }
      std::vector<pollfd> files = {
          {signals_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
      for (const Client& client : clients_) {
        files.push_back(
            {client.socket.fd(),
             static_cast<short>(client.answers ? POLLOUT : POLLIN), 0});
      }
      for (const int file : pool_.files()) files.push_back({file, POLLIN, 0});
      ::poll(files.data(), files.size(), static_cast<int>(wait.count()));
      if (take_signals()) return;
      size_t at = 2;
      for (Client& client : clients_) {
        if (files[at++].revents != 0) serve(client);
        client.closed |= Clock::now() - client.began > kPatience;
      }
      std::erase_if(clients_, [](const Client& one) { return one.closed; });
      if (files[1].revents != 0) accept_all();
    }
  }

 private:
  // Whether one of them ends the daemon.
  bool take_signals() {
    bool ends = false;
    signalfd_siginfo info{};
    while (::read(signals_.fd(), &info, sizeof info) == sizeof info) {
      ends |= info.ssi_signo != SIGCHLD && info.ssi_signo != SIGHUP;
    }
    return ends;
  }

  void accept_all() {
    while (clients_.size() < kMostClients) {
      FileDescriptor socket(::accept4(
          listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.is_open()) return;
      ucred other{};
      socklen_t size = sizeof other;
      if (::getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &other, &size) !=
          0) {
        continue;
      }
      Client& client = clients_.emplace_back();
      client.socket = std::move(socket);
      client.peer = {other.uid, other.gid};
    }
  }

  void serve(Client& client) {
    if (!client.answers) {
      read_from(client);
      if (client.in.empty() || client.in.back() != '\n') return;
      client.out = answer(client) + "\n";
      client.answers = true;
    }
    std::string_view rest = std::string_view(client.out).substr(client.sent);
    const int error = write_all(client.socket.fd(), rest);
    client.sent = client.out.size() - rest.size();
    client.closed = rest.empty() || (error != EAGAIN && error != 0);
  }

  void read_from(Client& client) {
    char bytes[1 << 16];
    while (true) {
      const ssize_t size = ::read(client.socket.fd(), bytes, sizeof bytes);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) {
        client.closed = size == 0 || errno != EAGAIN;
        return;
      }
      client.in.append(bytes, static_cast<size_t>(size));
      if (client.in.size() > kLongestRequest) {
        client.closed = true;
        return;
      }
      if (client.in.back() == '\n') return;
    }
  }

  std::string answer(const Client& client) {
    const auto refusal = [](const char* text, int code) {
      return Pool::Json{{"error", text}, {"code", code}};
    };
    Pool::Json json;
    try {
      json = pool_.answer(Pool::Json::parse(client.in), client.peer);
    } catch (const Error& error) {
      json = refusal(error.what(), static_cast<int>(error.exit_code()));
    } catch (const std::exception& error) {
      json = refusal(error.what(), 1);
    }
    return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

  Pool& pool_;
  FileDescriptor listener_;
  FileDescriptor signals_;
  std::list<Client> clients_;
};

}  // namespace

int serve(
    const fs::path& folder, const Settings& settings, const std::string& name,
    const PoolDevices& devices, const RemoteOptions& remote) {
  check_capacity(settings, name, static_cast<int64_t>(devices.all.size()));
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw ConfigError(
        format("--folder {}: {}", folder.string(), error.message()));
  }
  // Jobs' environments may hold secrets; they are in the database and in files.
  ::umask(0066);
  const FileDescriptor locked = lock(folder);
  FileDescriptor signals = signal_file();
  const RemoteAccess access = serve_remotely(fs::absolute(folder), remote);
  Pool pool(fs::absolute(folder), settings, devices, access.page_url);
  Server server(pool, listen_at(folder, settings.group), std::move(signals));
  std::cout << format(
      "echelon pool: {} for {}; {}\n",
      counted(
          static_cast<int64_t>(devices.all.size()),
          devices.gpus ? "GPU" : "slot"),
      counted(static_cast<int64_t>(settings.projects.size()), "project"),
      socket_of(folder).string());
  if (!access.page_url.empty()) {
    // Without the token: this may be kept where others read it.
    std::cout << format(
        "echelon pool: its page is at {}, and `echelon pool page` prints the "
        "address with its token\n",
        access.page_url.substr(0, access.page_url.find('?')));
    if (!access.page_is_local) {
      std::cout << "echelon pool: the page is not encrypted, and other hosts "
                   "can reach it; who listens on the network sees its token\n";
    }
  }
  if (!access.commands.empty()) {
    std::cout << format(
        "echelon pool: commands at {}, for those who have {}\n",
        access.commands, access.token);
  }
  std::cout << std::flush;
  server.run();
  std::cout << "echelon pool: the daemon ends; jobs go on\n" << std::flush;
  return 0;
}

}  // namespace echelon::pool
