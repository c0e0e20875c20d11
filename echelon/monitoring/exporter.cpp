#include "echelon/monitoring/exporter.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "echelon/error.h"
#include "echelon/monitoring/listen.h"
#include "echelon/monitoring/metric_page.h"
#include "echelon/monitoring/observer.h"
#include "echelon/monitoring/page_server.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

constexpr const char* kPath = "/metrics";
constexpr std::chrono::seconds kBetweenLooks{1};

// The process that serves.
[[noreturn]] void serve(
    FileDescriptor listener, const ExporterOptions& options,
    const JobBoard& board) {
  JobObserver observer(options.run, options.folder, options.saves, board);
  const auto make = [&] { return metric_page(observer.look()); };
  PageServer server(
      std::move(listener),
      {{kPath, "text/plain; version=0.0.4; charset=utf-8", make}});
  auto looked = std::chrono::steady_clock::now();
  for (;;) {
    server.serve(kBetweenLooks);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked < kBetweenLooks) continue;
    looked = now;
    observer.follow_run();
  }
}

// Closes what this process has of the launcher's: locks and sockets are held by
// whoever has them open.
void keep_only(int kept) {
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd <= 2; ++fd) dup2(null, fd);
  if (kept > 3) close_range(3, static_cast<unsigned>(kept) - 1, 0);
  close_range(static_cast<unsigned>(kept) + 1, ~0U, 0);
}

}  // namespace

Exporter::Exporter(const ExporterOptions& options, const JobBoard& board) {
  Listening listening = listen_at(options.address, "--metrics-address");
  url_ = format("http://{}{}", listening.address, kPath);
  is_loopback_ = listening.loopback;
  const pid_t launcher = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) {
    throw ConfigError(format(
        "--metrics-address {}: no process that serves the page: {}",
        options.address, std::strerror(errno)));
  }
  if (pid_ > 0) return;
  setpgid(0, 0);  // a terminal's Ctrl-C is not for it
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_NAME, "echelon-metrics");
  if (::getppid() != launcher) _exit(0);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  setpriority(PRIO_PROCESS, 0, 10);  // the ranks come first
  keep_only(listening.socket.fd());
  try {
    serve(std::move(listening.socket), options, board);
  } catch (const std::exception&) {
  }
  _exit(1);
}

Exporter::~Exporter() {
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace echelon::monitoring
