// The guard is one loop around poll(). All its signals are blocked and SIGCHLD
// comes through a file, so poll() sees orders, the launcher's end and ended
// children alike. An error of exec comes back through a pipe that a successful
// exec closes. After the main process of the rank has ended, its other
// processes get SIGTERM, then SIGKILL; the guard ends when waitpid has no child
// left.
#include "echelon/launch/guard.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

// The remaining processes of a rank whose main process has ended may take this
// long after SIGTERM; they are usually helpers that notice by themselves.
constexpr int64_t kLeftoverNs = 1'000'000'000;
// PF_EXITING of the kernel, in the flags of /proc/PID/stat.
constexpr unsigned kExiting = 0x4;

// The files above 2 that this process has, and perhaps others.
std::vector<int> open_files() {
  std::vector<int> files;
  if (DIR* dir = opendir("/proc/self/fd")) {
    while (const dirent* entry = readdir(dir)) {
      const int fd = std::atoi(entry->d_name);
      if (fd > 2 && fd != dirfd(dir)) files.push_back(fd);
    }
    closedir(dir);
  } else {
    for (int fd = 3; fd < sysconf(_SC_OPEN_MAX); ++fd) files.push_back(fd);
  }
  return files;
}

// A forked guard inherits the launcher's ends of every other guard's socket and
// pipes; while it held them, nobody would see them close.
void close_launcher_files(const std::vector<int>& keep) {
  for (const int fd : open_files()) {
    const int flags = fcntl(fd, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) != 0 &&
        std::find(keep.begin(), keep.end(), fd) == keep.end()) {
      close(fd);
    }
  }
}

// True when the process is exiting or has a pending SIGKILL, although waitpid()
// does not report it yet: its peers may notice first.
bool is_dying(pid_t pid) {
  std::ifstream stat(format("/proc/{}/stat", pid));
  std::string text;
  std::getline(stat, text);
  // pid (name) state parent group session terminal group flags …
  std::istringstream fields(
      text.substr(std::min(text.rfind(')'), text.size())));
  std::string skipped;
  unsigned flags = 0;
  for (int i = 0; i < 7; ++i) fields >> skipped;
  if (fields >> flags && (flags & kExiting) != 0) return true;
  std::ifstream status(format("/proc/{}/status", pid));
  while (std::getline(status, text)) {
    if (text.starts_with("SigPnd:") || text.starts_with("ShdPnd:")) {
      const auto pending = std::strtoull(text.c_str() + 7, nullptr, 16);
      if ((pending >> (SIGKILL - 1) & 1) != 0) return true;
    }
  }
  return false;
}

// The process between launcher and rank.
class GuardProcess {
 public:
  GuardProcess(const GuardSpec& spec, int socket)
      : spec_(spec), socket_(socket) {}

  void run() {
    prepare();
    if (!start()) finish();
    if (rank_ == 0) return;
    for (;;) {
      pollfd files[2] = {{socket_, POLLIN, 0}, {children_, POLLIN, 0}};
      const int64_t left = leftover_deadline_ns_ - steady_now_ns();
      const int timeout =
          leftover_deadline_ns_ == 0
              ? -1
              : static_cast<int>(std::max<int64_t>(0, left / 1'000'000 + 1));
      poll(files, 2, timeout);
      if (files[1].revents != 0) {
        signalfd_siginfo info[8];
        (void)!read(children_, info, sizeof info);
      }
      reap();
      if (files[0].revents != 0) obey();
      if (leftover_deadline_ns_ != 0 &&
          steady_now_ns() >= leftover_deadline_ns_) {
        kill_everything();
      }
    }
  }

 private:
  void prepare() {
    setpgid(0, 0);  // the launcher forwards a terminal's Ctrl-C
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "echelon-guard");
    close_launcher_files(
        {socket_, spec_.input, spec_.output, spec_.error, spec_.master_fd});
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &mask_before_);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    children_ = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
  }

  bool start() {
    int failure[2];
    if (pipe2(failure, O_CLOEXEC) != 0) {
      tell(GuardReport::fork_failed, errno);
      return false;
    }
    const pid_t guard = getpid();
    rank_ = fork();
    if (rank_ == 0) {
      become_rank(guard, failure[1]);
      return true;
    }
    const int fork_error = errno;
    close(failure[1]);
    if (rank_ < 0) {
      tell(GuardReport::fork_failed, fork_error);
      return false;
    }
    // Before anything else: the launcher names the rank by its process.
    tell(GuardReport::started, 0);
    // Both processes set the group: whichever comes first, it is there before
    // either goes on.
    setpgid(rank_, rank_);
    release_files();
    int exec_error = 0;
    const bool failed =
        read(failure[0], &exec_error, sizeof exec_error) == sizeof exec_error;
    close(failure[0]);
    if (failed) {
      waitpid(rank_, nullptr, 0);
      tell(GuardReport::exec_failed, exec_error);
      return false;
    }
    return true;
  }

  void become_rank(pid_t guard, int failure) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The guard may have ended before prctl() took effect.
    if (getppid() != guard) _exit(127);
    const int input =
        spec_.input >= 0 ? spec_.input : open("/dev/null", O_RDONLY);
    dup2(input, 0);
    if (spec_.output >= 0) dup2(spec_.output, 1);
    if (spec_.error >= 0) dup2(spec_.error, 2);
    if (input > 2 && spec_.input < 0) close(input);
    // Without close-on-exec the program inherits it.
    if (spec_.master_fd >= 0) fcntl(spec_.master_fd, F_SETFD, 0);
    // The launcher ignores these, and exec keeps ignored signals ignored.
    signal(SIGPIPE, SIG_DFL);
    signal(SIGXFSZ, SIG_DFL);
    if (spec_.loaded) {
      close_launcher_files({});  // as exec does, which tells the guard too
      sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
      return;
    }
    auto arguments = argv_of(spec_.command);
    auto variables = argv_of(spec_.environment);
    sigprocmask(
        SIG_SETMASK, static_cast<const sigset_t*>(spec_.signal_mask), nullptr);
    execve(spec_.path.c_str(), arguments.data(), variables.data());
    const int error = errno;
    (void)!write(failure, &error, sizeof error);
    _exit(127);
  }

  // The guard must not keep open the rank's pipes, the terminal, or files that
  // the launcher's caller gave to the rank.
  void release_files() {
    const int null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd <= 2; ++fd) dup2(null, fd);
    for (const int fd : open_files()) {
      if (fd == socket_ || fd == children_) continue;
      // The exec pipe's read end is still needed; it alone is close-on-exec.
      if (fd != null && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 &&
          fd != spec_.output && fd != spec_.error && fd != spec_.input &&
          fd != spec_.master_fd) {
        continue;
      }
      close(fd);
    }
  }

  void tell(GuardReport::Kind kind, int value) {
    const GuardReport report{kind, value, rank_, steady_now_ns(), ordered_};
    (void)!send(socket_, &report, sizeof report, MSG_NOSIGNAL);
  }

  // Waits for every child that has ended. Returns false when none is left.
  bool reap() {
    for (;;) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED);
      if (pid == 0) return true;
      if (pid < 0) {
        if (errno == EINTR) continue;
        if (rank_gone_) {
          tell(GuardReport::empty, 0);
          finish();
        }
        return false;
      }
      if (pid == rank_ && !rank_gone_) note_rank(status);
    }
  }

  void note_rank(int status) {
    if (WIFSTOPPED(status)) {
      tell(GuardReport::stopped, WSTOPSIG(status));
    } else if (WIFCONTINUED(status)) {
      tell(GuardReport::continued, 0);
    } else {
      rank_gone_ = true;
      tell(GuardReport::exited, status);
      // A stopped process takes SIGTERM only when it is continued.
      for (const pid_t pid : descendants(getpid())) {
        kill(pid, SIGTERM);
        kill(pid, SIGCONT);
      }
      leftover_deadline_ns_ = steady_now_ns() + kLeftoverNs;
    }
  }

  void obey() {
    GuardOrder order;
    const ssize_t got = recv(socket_, &order, sizeof order, MSG_DONTWAIT);
    if (got == sizeof order) {
      if (order.ends && !is_dying(rank_)) ordered_ = true;
      if (order.signal == SIGKILL) {
        kill_everything();
      } else {
        forward(order.signal);
      }
    } else if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      kill_everything();
    }
  }

  void forward(int signal) {
    if (rank_gone_) return;
    kill(-rank_, signal);
    if (signal == SIGTERM || signal == SIGHUP) {
      kill(-rank_, SIGCONT);  // a stopped rank cannot end
    }
  }

  // New processes may start meanwhile, so this repeats until there is none.
  [[noreturn]] void kill_everything() {
    for (;;) {
      if (!rank_gone_) kill(-rank_, SIGKILL);
      for (const pid_t pid : descendants(getpid())) kill(pid, SIGKILL);
      reap();  // ends this process when nothing is left
      pollfd file{children_, POLLIN, 0};
      poll(&file, 1, 20);
      signalfd_siginfo info[8];
      (void)!read(children_, info, sizeof info);
      reap();
    }
  }

  [[noreturn]] void finish() {
    char byte;
    // The launcher removes these itself while it lives.
    const ssize_t got = recv(socket_, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    if (got == 0 || (got < 0 && errno == ECONNRESET)) {
      unlink(spec_.error_file.c_str());
      rmdir(spec_.scratch_dir.c_str());
    }
    _exit(0);
  }

  const GuardSpec& spec_;
  int socket_;
  int children_ = -1;
  sigset_t mask_before_;
  pid_t rank_ = -1;  // 0 in the rank itself
  bool rank_gone_ = false;
  bool ordered_ = false;  // the rank was told to end
  int64_t leftover_deadline_ns_ = 0;
};

}  // namespace

int64_t steady_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

std::vector<char*> argv_of(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const auto& text : strings) {
    result.push_back(const_cast<char*>(text.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

Guard start_guard(const GuardSpec& spec) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw ConfigError(format(
        "[launch] no socket to watch a rank by: {}; `ulimit -n` sets the limit",
        std::strerror(errno)));
  }
  const pid_t pid = fork();
  if (pid < 0) {
    const int error = errno;
    close(ends[0]);
    close(ends[1]);
    throw ConfigError(format(
        "[launch] no process for a rank: {}; `ulimit -u` and the container's "
        "pids limit set how many there may be (two a rank)",
        std::strerror(error)));
  }
  if (pid == 0) {
    close(ends[0]);
    run_guard(spec, ends[1]);
  }
  close(ends[1]);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {pid, ends[0]};
}

void run_guard(const GuardSpec& spec, int socket) {
  GuardProcess(spec, socket).run();
}

std::vector<pid_t> descendants(pid_t root, const std::vector<pid_t>& except) {
  std::unordered_multimap<pid_t, pid_t> children;
  DIR* proc = opendir("/proc");
  if (proc == nullptr) return {};
  while (const dirent* entry = readdir(proc)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    const int fd = openat(
        dirfd(proc), (std::string(entry->d_name) + "/stat").c_str(),
        O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    char text[512];
    const ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[std::max<ssize_t>(0, size)] = '\0';
    // pid (name) state parent …; the name may hold anything but ends last.
    const char* name_end = std::strrchr(text, ')');
    if (name_end != nullptr && std::strlen(name_end) > 4) {
      children.emplace(std::atoi(name_end + 4), pid);
    }
  }
  closedir(proc);
  std::vector<pid_t> found;
  std::vector<pid_t> open = {root};
  while (!open.empty()) {
    const pid_t parent = open.back();
    open.pop_back();
    const auto [begin, end] = children.equal_range(parent);
    for (auto it = begin; it != end; ++it) {
      if (std::find(except.begin(), except.end(), it->second) == except.end()) {
        found.push_back(it->second);
        open.push_back(it->second);
      }
    }
  }
  return found;
}

}  // namespace echelon::launch
