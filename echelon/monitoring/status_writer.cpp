#include "echelon/monitoring/status_writer.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "echelon/error.h"
#include "echelon/monitoring/observer.h"
#include "echelon/monitoring/run_status.h"
#include "echelon/monitoring/side_process.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::monitoring {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kBeat{1000};
constexpr uint64_t kBeatsOfText = 5;
constexpr milliseconds kMostAtEnd{2000};
constexpr std::chrono::minutes kMinute{1};
constexpr int kMostOfTime = 500;  // one part in so many

std::string phase_name(RankPhase phase) {
  switch (phase) {
    case RankPhase::step:
      return "step";
    case RankPhase::evaluation:
      return "evaluation";
    case RankPhase::other:
      break;
  }
  return "other";
}

// Since when each rank has made no progress.
class Idleness {
 public:
  std::optional<double> seconds(const JobFacts::Rank& rank) {
    const auto now = steady_clock::now();
    auto& [pid, count, since] = ranks_[rank.number];
    if (pid != rank.pid || count != rank.progress.count) {
      pid = rank.pid;
      count = rank.progress.count;
      since = now;
    }
    if (rank.progress.count == 0) return std::nullopt;
    return std::chrono::duration<double>(now - since).count();
  }

 private:
  struct Rank {
    pid_t pid = 0;
    uint64_t count = 0;
    steady_clock::time_point since;
  };
  std::map<int, Rank> ranks_;
};

RunStatus status_now(const Observed& observed, Idleness& idleness) {
  const JobFacts& job = observed.job;
  RunStatus status;
  status.host = observed.host;
  status.time = observed.now;
  status.started = observed.started;
  status.coordinates = job.coordinates;
  status.world_size = job.world_size;
  status.num_hosts = job.num_hosts;
  status.generation = job.generation;
  for (const uint64_t count : job.restarts) status.restarts += count;
  status.failure = job.failure;
  status.exit_code = job.exit_code;
  for (size_t i = 0; i < job.ranks.size(); ++i) {
    const JobFacts::Rank& rank = job.ranks[i];
    RankStatus one;
    one.rank = rank.number;
    one.pid = rank.pid;
    one.up = rank.up;
    one.phase = phase_name(rank.progress.phase);
    one.progress = rank.progress.count;
    one.idle_seconds = idleness.seconds(rank);
    if (i < observed.memory.size()) one.resident_bytes = observed.memory[i];
    if (i < observed.gpus.size()) {
      const auto& gpu = observed.gpus[i];
      one.gpu = gpu.index;
      one.gpu_busy = gpu.busy;
      one.gpu_memory_used = gpu.memory_used;
      one.gpu_memory_total = gpu.memory_total;
    }
    status.ranks.push_back(std::move(one));
  }
  return status;
}

// The process that writes.
class Writer {
 public:
  Writer(const ExporterOptions& options, const JobBoard& board, pid_t launcher)
      : options_(options),
        observer_(options.run, options.folder, options.saves, board),
        launcher_(launcher),
        process_(process_name(launcher)) {}

  void run(int from) {
    pollfd file{from, POLLIN, 0};
    do {
      write(/*lost=*/false);
      each_minute();
    } while (poll(&file, 1, static_cast<int>(kBeat.count())) <= 0);
    // A launcher that was killed has closed its end, which reads as no byte.
    char word = 0;
    write(/*lost=*/::recv(from, &word, 1, 0) != 1);
    remove_text();
  }

 private:
  // Of the time, this takes a share of kMostOfTime at most.
  void each_minute() {
    if (!options_.each_minute || steady_clock::now() < minute_) return;
    const auto began = steady_clock::now();
    options_.each_minute();
    const auto took = steady_clock::now() - began;
    minute_ =
        began + std::max<steady_clock::duration>(kMinute, took * kMostOfTime);
  }

  void write(bool lost) {
    const Observed& observed = observer_.look();
    RunStatus status = status_now(observed, idleness_);
    status.pid = launcher_;
    status.process = process_;
    status.beat = ++beat_;
    status.lost = lost && !status.exit_code;
    write_status(std::move(status));
    if (options_.text_file.empty() || beat_ % kBeatsOfText != 1) return;
    try {
      write_file_atomically(options_.text_file, metric_page(observed));
    } catch (const Error&) {
      // The disk may have room again.
    }
  }

  void write_status(RunStatus status) {
    // Before the job has begun, and where hosts have not met, there is none.
    if (options_.folder.empty()) return;
    if (status.ranks.empty()) {
      if (!status.exit_code && !status.lost) return;
      if (path_.empty()) status.coordinates = true;
    }
    if (!status.ranks.empty()) {
      const auto path = options_.folder / kStatusFolder /
                        format("rank-{}.json", status.ranks.front().rank);
      // Hosts that come or leave give this one other ranks.
      std::error_code ignored;
      if (!path_.empty() && path_ != path) {
        std::filesystem::remove(path_, ignored);
      }
      path_ = path;
    }
    if (path_.empty()) return;
    try {
      write_file_atomically(path_, to_json(status));
    } catch (const Error&) {
    }
  }

  void remove_text() const {
    std::error_code ignored;
    if (!options_.text_file.empty()) {
      std::filesystem::remove(options_.text_file, ignored);
    }
  }

  const ExporterOptions& options_;
  JobObserver observer_;
  const pid_t launcher_;
  const std::string process_;
  Idleness idleness_;
  uint64_t beat_ = 0;
  std::filesystem::path path_;
  steady_clock::time_point minute_ = steady_clock::now() + kMinute;
};

void check_text_file(const std::filesystem::path& path) {
  try {
    write_file_atomically(path, "");
  } catch (const Error& error) {
    throw ConfigError(format(
        "--metrics-file {}: {}; name a file in a folder that can be written",
        path.string(), error.what()));
  }
}

}  // namespace

StatusWriter::StatusWriter(
    const ExporterOptions& options, const JobBoard& board) {
  if (options.folder.empty() && options.text_file.empty()) return;
  if (!options.text_file.empty()) check_text_file(options.text_file);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
  FileDescriptor from(ends[0]);
  to_ = FileDescriptor(ends[1]);
  const pid_t launcher = ::getpid();
  try {
    pid_ = start_side_process(
        "echelon-status", from.fd(),
        [&] { Writer(options, board, launcher).run(from.fd()); },
        ParentEnd::leaves_it);
  } catch (const Error&) {  // without the process, the job goes on
  }
}

StatusWriter::~StatusWriter() {
  if (pid_ <= 0) return;
  (void)::send(to_.fd(), "e", 1, MSG_NOSIGNAL);
  const auto until = steady_clock::now() + kMostAtEnd;
  bool killed = false;
  // A process that hangs in the kernel is left to init.
  while (::waitpid(pid_, nullptr, WNOHANG) == 0) {
    if (steady_clock::now() > until) {
      if (std::exchange(killed, true)) return;
      kill(pid_, SIGKILL);
    }
    usleep(killed ? 100'000 : 1'000);
  }
}

}  // namespace echelon::monitoring
