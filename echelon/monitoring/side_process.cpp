#include "echelon/monitoring/side_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

// Locks and sockets are held by whoever has them open.
void keep_only(int kept) {
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd <= 2; ++fd) dup2(null, fd);
  if (kept > 3) close_range(3, static_cast<unsigned>(kept) - 1, 0);
  close_range(static_cast<unsigned>(kept) + 1, ~0U, 0);
}

}  // namespace

pid_t start_side_process(
    const char* name, int kept, const std::function<void()>& work,
    ParentEnd end) {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    throw Error(
        format("cannot start the process {}: {}", name, std::strerror(errno)));
  }
  if (pid > 0) return pid;
  setpgid(0, 0);
  prctl(PR_SET_NAME, name);
  if (end == ParentEnd::ends_it) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) _exit(0);
  }
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  setpriority(PRIO_PROCESS, 0, 10);  // the ranks come first
  keep_only(kept);
  try {
    work();
  } catch (const std::exception&) {
    _exit(1);
  }
  _exit(0);
}

}  // namespace echelon::monitoring
