#include "echelon/monitoring/exporter.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "echelon/monitoring/listen.h"
#include "echelon/monitoring/metric_page.h"
#include "echelon/monitoring/observer.h"
#include "echelon/monitoring/page_server.h"
#include "echelon/monitoring/side_process.h"
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
  PageServer server(std::move(listener), {{kPath, kMetricsType, make}});
  auto looked = std::chrono::steady_clock::now();
  for (;;) {
    server.serve(kBetweenLooks);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked < kBetweenLooks) continue;
    looked = now;
    observer.follow_run();
  }
}

}  // namespace

Exporter::Exporter(const ExporterOptions& options, const JobBoard& board) {
  Listening listening = listen_at(options.address, "--metrics-address");
  url_ = format("http://{}{}", listening.address, kPath);
  is_loopback_ = listening.loopback;
  pid_ = start_side_process("echelon-metrics", listening.socket.fd(), [&] {
    serve(std::move(listening.socket), options, board);
  });
}

Exporter::~Exporter() {
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace echelon::monitoring
