// A request is one message: a file in memory with the text of a GuardSpec, and
// the files that the guard and the rank use. The answer is the guard's process
// number. The server inherits its signal mask from the launcher's caller, and
// so do the ranks. It starts with the variables of a rank, since libraries read
// some when they are loaded (OMP_NUM_THREADS), but without RANK.
//
// A rank overwrites the variables that it inherits in place: /proc/PID/environ,
// which tools read, shows its own. The server's have room for them at the end.
#include "echelon/launch/fork_server.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

namespace echelon::launch {
namespace {

constexpr const char* kVariable = "ECHELON_FORK_SERVER=";
constexpr const char* kMasterVariable = "ECHELON_MASTER_FD=";
constexpr size_t kMostFiles = 6;
constexpr int kMostWaitMs = 60'000;
// So many bytes a rank's variables may be longer than the server's.
constexpr size_t kRoom = 4096;

// Strings one after the other, each ended by a NUL, which none can hold.
class SpecWriter {
 public:
  void add(const std::string& text) { text_ += text + '\0'; }
  void add(const std::vector<std::string>& list) {
    add(std::to_string(list.size()));
    for (const auto& item : list) add(item);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

class SpecReader {
 public:
  explicit SpecReader(std::string text) : text_(std::move(text)) {}
  std::string next() {
    const std::string item = text_.c_str() + std::min(at_, text_.size());
    at_ += item.size() + 1;
    return item;
  }
  std::vector<std::string> list() {
    std::vector<std::string> items(std::strtoul(next().c_str(), nullptr, 10));
    for (auto& item : items) item = next();
    return items;
  }

 private:
  std::string text_;
  size_t at_ = 0;
};

// The files of a request: the text and the guard's socket, standard output and
// error, then standard input and the master's socket where there are any.
struct Request {
  std::vector<int> files;
  std::string text;
};

Request request_of(const GuardSpec& spec, int socket) {
  SpecWriter writer;
  writer.add(spec.command);
  writer.add(spec.environment);
  writer.add(spec.error_file);
  writer.add(spec.scratch_dir);
  Request request;
  request.files = {
      -1, socket, spec.output >= 0 ? spec.output : STDOUT_FILENO,
      spec.error >= 0 ? spec.error : STDERR_FILENO};
  for (const int file : {spec.input, spec.master_fd}) {
    writer.add(file >= 0 ? "1" : "");
    if (file >= 0) request.files.push_back(file);
  }
  request.text = writer.text();
  return request;
}

GuardSpec spec_of(const std::vector<int>& files, std::string text) {
  SpecReader reader(std::move(text));
  GuardSpec spec;
  spec.loaded = true;
  spec.command = reader.list();
  spec.environment = reader.list();
  spec.error_file = reader.next();
  spec.scratch_dir = reader.next();
  spec.output = files[2];
  spec.error = files[3];
  size_t next = 4;
  if (!reader.next().empty() && next < files.size()) spec.input = files[next++];
  if (!reader.next().empty() && next < files.size()) {
    // The file has another number here than in the launcher.
    spec.master_fd = files[next];
    for (auto& variable : spec.environment) {
      if (variable.starts_with(kMasterVariable)) {
        variable = kMasterVariable + std::to_string(spec.master_fd);
      }
    }
  }
  return spec;
}

bool write_all(int file, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = write(file, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += static_cast<size_t>(n);
  }
  return true;
}

std::string read_all(int file) {
  std::string text;
  std::array<char, 4096> piece;
  for (;;) {
    const ssize_t n = pread(
        file, piece.data(), piece.size(), static_cast<off_t>(text.size()));
    if (n <= 0) return text;
    text.append(piece.data(), static_cast<size_t>(n));
  }
}

bool send_files(int socket, const std::vector<int>& files) {
  char byte = 0;
  iovec content{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), files.data(), files.size() * sizeof(int));
  return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

// Empty when the other side has gone.
std::vector<int> receive_files(int socket) {
  char byte;
  iovec content{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))];
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (got != 1 || header == nullptr || header->cmsg_type != SCM_RIGHTS) {
    return {};
  }
  std::vector<int> files((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  std::memcpy(files.data(), CMSG_DATA(header), files.size() * sizeof(int));
  return files;
}

// A rank that is forked while another thread holds a lock would wait for it.
bool has_one_thread() {
  int threads = 0;
  if (DIR* tasks = opendir("/proc/self/task")) {
    while (const dirent* entry = readdir(tasks)) {
      if (entry->d_name[0] != '.') ++threads;
    }
    closedir(tasks);
  }
  return threads == 1;
}

// Where the kernel has put this process's variables.
std::pair<char*, size_t> variables_in_place() {
  std::ifstream file("/proc/self/stat");
  std::string text(std::istreambuf_iterator<char>(file), {});
  // The second field may hold spaces, but ends with the last parenthesis.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int i = 3; i < 50; ++i) fields >> field;
  unsigned long begin = 0, end = 0;
  if (!(fields >> begin >> end) || end <= begin) return {nullptr, 0};
  return {reinterpret_cast<char*>(begin), end - begin};
}

void take_environment(const std::vector<std::string>& variables) {
  static std::string text;
  static std::vector<char*> pointers;
  for (const auto& variable : variables) text += variable + '\0';
  auto [place, size] = variables_in_place();
  if (text.size() <= size) {
    std::memset(place, 0, size);
    std::memcpy(place, text.data(), text.size());
  } else {
    place = text.data();
  }
  for (const auto& variable : variables) {
    pointers.push_back(place);
    place += variable.size() + 1;
  }
  pointers.push_back(nullptr);
  environ = pointers.data();
}

[[noreturn]] void become_server(const GuardSpec& spec, int socket) {
  setpgid(0, 0);  // a terminal's Ctrl-C is for the launcher
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int null = open("/dev/null", O_RDWR);
  for (int file = 0; file <= 2; ++file) dup2(null, file);
  if (null > 2) close(null);
  fcntl(socket, F_SETFD, 0);
  std::vector<std::string> variables;
  for (const auto& variable : spec.environment) {
    if (!variable.starts_with("RANK=")) variables.push_back(variable);
  }
  variables.push_back(
      kVariable + std::to_string(socket) + std::string(kRoom, ' '));
  sigprocmask(
      SIG_SETMASK, static_cast<const sigset_t*>(spec.signal_mask), nullptr);
  execve(
      spec.path.c_str(), argv_of(spec.command).data(),
      argv_of(variables).data());
  _exit(127);
}

}  // namespace

bool ForkServer::start(const GuardSpec& spec) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return false;
  }
  socket_ = FileDescriptor(ends[0]);
  FileDescriptor theirs(ends[1]);
  pid_ = fork();
  if (pid_ == 0) become_server(spec, theirs.fd());
  return pid_ > 0;
}

void ForkServer::warm(const GuardSpec& spec) {
  if (pid_ <= 0 && !failed_) failed_ = !start(spec);
}

void ForkServer::end() {
  socket_.close();
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
}

std::optional<Guard>
ForkServer::start_guard(const GuardSpec& spec, int interrupt) {
  if (failed_) return std::nullopt;
  failed_ = true;  // until it has served
  if (pid_ <= 0 && !start(spec)) return std::nullopt;
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return std::nullopt;
  }
  FileDescriptor ours(ends[0]);
  const FileDescriptor theirs(ends[1]);
  Request request = request_of(spec, theirs.fd());
  const FileDescriptor text(memfd_create("echelon-rank", MFD_CLOEXEC));
  request.files[0] = text.fd();
  if (!text.is_open() || !write_all(text.fd(), request.text) ||
      !send_files(socket_.fd(), request.files)) {
    return std::nullopt;
  }
  pollfd files[2] = {{socket_.fd(), POLLIN, 0}, {interrupt, POLLIN, 0}};
  int32_t pid = -1;
  if (poll(files, 2, kMostWaitMs) <= 0 || files[0].revents == 0 ||
      recv(socket_.fd(), &pid, sizeof pid, 0) != sizeof pid || pid <= 0) {
    // What it has not answered, it must not do later.
    end();
    return std::nullopt;
  }
  failed_ = false;
  fcntl(ours.fd(), F_SETFL, O_NONBLOCK);
  return Guard{pid, ours.release()};
}

void serve_forks() {
  const char* value = std::getenv("ECHELON_FORK_SERVER");
  if (value == nullptr) return;
  const int socket = std::atoi(value);
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  if (!has_one_thread()) _exit(1);
  prctl(PR_SET_NAME, "fork-server");
  signal(SIGCHLD, SIG_IGN);  // nobody waits for guards
  for (;;) {
    const std::vector<int> files = receive_files(socket);
    if (files.size() < 4) _exit(0);
    const int32_t pid = fork();
    if (pid == 0) {
      signal(SIGCHLD, SIG_DFL);
      const GuardSpec spec = spec_of(files, read_all(files[0]));
      run_guard(spec, files[1]);
      prctl(PR_SET_NAME, program_invocation_short_name);
      take_environment(spec.environment);
      return;
    }
    for (const int file : files) close(file);
    (void)!send(socket, &pid, sizeof pid, MSG_NOSIGNAL);
  }
}

}  // namespace echelon::launch
