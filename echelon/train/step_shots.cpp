#include "echelon/train/step_shots.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <exception>
#include <utility>

#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

constexpr int64_t kMostOfTime = 500;  // one part in so many

// The processor time of this thread: waiting costs training nothing.
int64_t thread_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

bool is_shown(int64_t rank, const Mesh& mesh) {
  if (mesh.size() <= StepShots::kMostRanks) return true;
  if (mesh.layout().pp == 1) return rank < StepShots::kMostRanks;
  return mesh.first_along(rank, {Axis::pp}) == 0;
}

StepShots::StepShots(
    const World& world, const Mesh& mesh, timeline::Recorder& recorder,
    std::filesystem::path folder, double seconds)
    : recorder_(recorder),
      on_device_(!world.device().is_cpu()),
      several_hosts_(world.local_size() != world.size()),
      shown_(is_shown(world.rank(), mesh)),
      interval_ns_(std::llround(seconds * 1e9)),
      rank_(world.rank()),
      rank_name_(format("rank {} ({})", world.rank(), world.device().str())),
      folder_(std::move(folder)),
      path_(folder_ / timeline::last_step_file(world.rank())) {}

StepShots::~StepShots() {
  if (writer_.joinable()) writer_.join();
}

bool StepShots::due() {
  const int64_t now = timeline::steady_now_ns();
  if (interval_ns_ == 0 || now < next_ns_ || busy_) return false;
  next_ns_ = now + std::max(interval_ns_, took_ns_ * kMostOfTime);
  return true;
}

void StepShots::after_step(int64_t step, bool asks, int64_t common_ns) {
  if (step_ == step) {
    step_ = -1;
    try {
      write(recorder_.take_step(step));
    } catch (const std::exception&) {
      // A device that has failed has no times. Its error is on its way.
    }
  }
  if (!asks) return;
  // On a device, the next step has begun when this one is read.
  step_ = step + (on_device_ ? 2 : 1);
  common_ns_ = common_ns;
  recorder_.also_record(step_);
}

void StepShots::write(std::vector<timeline::Span> spans) {
  if (!shown_ || spans.empty() || busy_) return;
  if (writer_.joinable()) writer_.join();
  busy_ = true;
  timeline::RankSpans step{
      .rank = rank_,
      .rank_name = rank_name_,
      .clock_offset_ns = several_hosts_ ? -common_ns_ : 0,
      .spans = std::move(spans)};
  writer_ = std::thread([this, step = std::move(step)] {
    ::setpriority(PRIO_PROCESS, 0, 10);  // this thread's
    try {
      // Another host may have no such folder.
      std::error_code error;
      if (std::filesystem::exists(folder_, error)) {
        write_file_atomically(path_, timeline::to_bytes(step));
      }
    } catch (const std::exception&) {
      // The next one may find room.
    }
    took_ns_ = thread_ns();
    busy_ = false;
  });
}

}  // namespace echelon
