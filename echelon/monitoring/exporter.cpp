#include "echelon/monitoring/exporter.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "echelon/monitoring/listen.h"
#include "echelon/monitoring/metric_page.h"
#include "echelon/monitoring/page_server.h"
#include "echelon/monitoring/run_tail.h"
#include "echelon/monitoring/side_process.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

constexpr const char* kPath = "/metrics";
constexpr std::chrono::seconds kBetweenLooks{1};

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::optional<double> resident_bytes(pid_t pid) {
  if (pid <= 0) return std::nullopt;
  std::ifstream file(format("/proc/{}/statm", pid));
  double total = 0, resident = 0;
  if (!(file >> total >> resident) || total == 0) return std::nullopt;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

double now_seconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// The process that serves.
[[noreturn]] void serve(
    FileDescriptor listener, const ExporterOptions& options,
    const JobBoard& board) {
  Observed observed{
      .run = options.run, .host = host_name(), .started = now_seconds()};
  observed.saves = options.saves;
  const auto began = std::chrono::steady_clock::now();
  std::optional<RunTail> tail;
  if (!options.folder.empty()) tail.emplace(options.folder);
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto visible =
      list == nullptr ? std::nullopt : std::optional<std::string>(list);
  const cluster::Nvml nvml;
  const auto make = [&] {
    observed.now = now_seconds();
    observed.up_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began)
            .count();
    observed.job = board.read();
    observed.memory.clear();
    for (const auto& rank : observed.job.ranks) {
      observed.memory.push_back(
          rank.up ? resident_bytes(rank.pid) : std::nullopt);
    }
    if (tail) {
      tail->poll();
      observed.figures = tail->figures();
    }
    observed.gpus = nvml.use(visible);
    return metric_page(observed);
  };
  PageServer server(std::move(listener), {{kPath, kMetricsType, make}});
  auto looked = std::chrono::steady_clock::now();
  for (;;) {
    server.serve(kBetweenLooks);
    const auto now = std::chrono::steady_clock::now();
    // Steps that are lost between two looks are not seen.
    if (!tail || now - looked < kBetweenLooks) continue;
    looked = now;
    tail->poll();
  }
}

}  // namespace

Exporter::Exporter(const ExporterOptions& options, const JobBoard& board) {
  Listening listening = listen_at(options.address, "--metrics-address");
  url_ = format("http://{}{}", listening.address, kPath);
  is_loopback_ = listening.loopback;
  // The ranks come first.
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
