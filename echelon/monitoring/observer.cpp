#include "echelon/monitoring/observer.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

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

}  // namespace

JobObserver::JobObserver(
    const std::string& run, const std::filesystem::path& folder, bool saves,
    const JobBoard& board)
    : board_(board),
      observed_{.run = run, .host = host_name(), .started = now_seconds()} {
  observed_.saves = saves;
  if (!folder.empty()) tail_.emplace(folder);
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr) visible_ = visible;
}

const Observed& JobObserver::look() {
  observed_.now = now_seconds();
  observed_.up_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began_)
          .count();
  observed_.job = board_.read();
  observed_.memory.clear();
  for (const auto& rank : observed_.job.ranks) {
    observed_.memory.push_back(
        rank.up ? resident_bytes(rank.pid) : std::nullopt);
  }
  follow_run();
  if (tail_) observed_.figures = tail_->figures();
  observed_.gpus = nvml_.use(
      observed_.job.visible_gpus ? observed_.job.visible_gpus : visible_);
  return observed_;
}

void JobObserver::follow_run() {
  if (tail_) tail_->poll();
}

}  // namespace echelon::monitoring
