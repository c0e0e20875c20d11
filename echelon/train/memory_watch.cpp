#include "echelon/train/memory_watch.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/train/strategies/count_job.h"

namespace echelon {
namespace {

// The number after `key` in a file of lines "key number …".
std::optional<int64_t>
number_of(const std::filesystem::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    try {
      return std::stoll(line.substr(key.size()));
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::optional<int64_t> available_host_bytes(const std::filesystem::path& root) {
  const auto kibibytes = number_of(root / "proc/meminfo", "MemAvailable:");
  if (!kibibytes) return std::nullopt;
  int64_t available = *kibibytes * 1024;
  const auto group = root / "sys/fs/cgroup";
  const auto most = number_of(group / "memory.max", "");
  const auto used = number_of(group / "memory.current", "");
  if (most && used) {
    const int64_t cache =
        number_of(group / "memory.stat", "inactive_file ").value_or(0);
    available =
        std::min(available, std::max<int64_t>(0, *most - *used + cache));
  }
  return available;
}

std::optional<int64_t> peak_memory(torch::Device device) {
  if (device.is_cpu()) {
    rusage usage{};
    if (::getrusage(RUSAGE_SELF, &usage) != 0) return std::nullopt;
    return int64_t{usage.ru_maxrss} * 1024;
  }
  auto* allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return std::nullopt;
  return allocator->getDeviceStats(device.index())
      .reserved_bytes[static_cast<size_t>(
          c10::CachingAllocator::StatType::AGGREGATE)]
      .peak;
}

MemoryWatch::MemoryWatch(
    const Job& job, const ModelSource& source, const World& world,
    const MeshGroups& groups)
    : job_(job),
      source_(source),
      rank_(world.rank()),
      pipeline_rank_(groups.along(Axis::pp).rank()),
      limit_bytes_(job.memory.limit_bytes),
      meter_(world.device()) {
  if (job.memory.offload != Offload::none ||
      job.memory.activations == Activations::offload) {
    check_host(world);
  }
  if (job.train.timeline_steps == 0 && limit_bytes_ == 0) return;
  meter_.limit(limit_bytes_);
  counting_ = meter_.count();
}

void MemoryWatch::check_host(const World& world) const {
  const auto available = available_host_bytes();
  if (available) {
    std::vector<int> ranks(static_cast<size_t>(world.local_size()));
    std::iota(ranks.begin(), ranks.end(), world.rank() - world.local_rank());
    const std::string excess = memory_plan::explain_host_memory(
        count_memory(job_, source_), job_, ranks, *available);
    if (!excess.empty()) throw ConfigError(excess);
  }
  // A late rank must not see memory that the others have taken meanwhile.
  world.group().barrier({.label = "host memory"});
}

void MemoryWatch::begin_step(const timeline::Recorder& recorder) {
  if (!counting_ || sampled_) return;
  if (sampling_ && recorder.ended()) end_samples();
  if (!sampling_ && !sampled_ && recorder.active()) {
    meter_.start_samples();
    sampling_ = true;
  }
}

void MemoryWatch::end_samples() {
  measured_.samples = meter_.take_samples();
  sampling_ = false;
  sampled_ = true;
  if (limit_bytes_ == 0) counting_.reset();
}

timeline::RankMemory MemoryWatch::measured() {
  if (sampling_) end_samples();
  if (measured_.samples.empty()) return measured_;
  measured_.limit_bytes = limit_bytes_;
  // With several devices in a process, each has only a part of this memory.
  if (!job_.model.devices.empty()) return measured_;
  try {
    const memory_plan::MemoryPlan plan =
        memory_plan::plan_memory(count_memory(job_, source_), job_);
    measured_.planned_bytes =
        plan.ranks.at(static_cast<size_t>(pipeline_rank_)).peak.total();
  } catch (const ConfigError&) {
    // A user's layers that need values cannot be counted: no line is drawn.
  }
  return measured_;
}

void MemoryWatch::fail(
    const std::string& place, const c10::OutOfMemoryError& error) {
  meter_.limit(0);  // the message needs memory, too
  std::string text =
      format("{}: rank {}: {}; ", place, rank_, first_line(error));
  try {
    text += memory_plan::explain_shortage(
        count_memory(job_, source_), job_, pipeline_rank_, meter_.at_shortage(),
        limit_bytes_);
  } catch (const ConfigError& uncounted) {
    text += std::string("no plan says what would help: ") + uncounted.what();
  }
  throw Error(text);
}

}  // namespace echelon
