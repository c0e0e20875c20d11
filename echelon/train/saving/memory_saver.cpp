#include "echelon/train/saving/memory_saver.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>

#include "echelon/error.h"
#include "echelon/train/saving/saver.h"

namespace echelon {
namespace {

// Adds the time of a scope.
class Held {
 public:
  explicit Held(int64_t& sum) : sum_(sum) {}
  ~Held() { sum_ += timeline::steady_now_ns() - began_; }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  int64_t& sum_;
  const int64_t began_ = timeline::steady_now_ns();
};

}  // namespace

int64_t time_between_copies(int64_t cost_ns) {
  constexpr double kBetweenFaultsNs = 3600e9;
  const auto cost = static_cast<double>(cost_ns);
  return static_cast<int64_t>(
      std::max(std::sqrt(2 * cost * kBetweenFaultsNs), 100 * cost));
}

MemorySaver::MemorySaver(
    const Job& job, const ModelSource& source, World& world,
    const MeshGroups& groups, timeline::Recorder* recorder,
    const RestartMemory& memory, int generation, int64_t kept_step)
    : job_(job),
      source_(source),
      world_(world),
      groups_(groups),
      recorder_(recorder),
      generation_(generation),
      slot_(memory.index(), world.rank(), kept_step, memory.number()) {
  try {
    sender_ = memory.make_sender();
  } catch (const CheckpointError& error) {
    std::fprintf(
        stderr,
        "warning: copies of the state in memory do not reach the next host, so "
        "that a lost host takes them along: rank %d: %s\n",
        world_.rank(), error.what());
  }
}

MemorySaver::~MemorySaver() {
  if (thread_.joinable()) thread_.join();
  if (sending_thread_.joinable()) sending_thread_.join();
}

bool MemorySaver::wanted(int64_t step) {
  const int64_t every = job_.elastic.memory_steps;
  if (every > 0) return step % every == 0;
  // On a GPU, the answer for the step before may be read after this one.
  if (step == asked_ + 1 && !world_.device().is_cpu()) return false;
  // Beside a GPU the thread has a core of its own.
  const int64_t busy_ns = busy_ns_ + sending_ns_;
  const int64_t cost = held_ns_ + (world_.device().is_cpu() ? busy_ns : 0);
  const bool is_wanted =
      timeline::steady_now_ns() - began_ns_ >= time_between_copies(cost);
  if (is_wanted) asked_ = step;
  return is_wanted;
}

void MemorySaver::finish() {
  if (!thread_.joinable()) return;
  const Held held(held_ns_);
  timeline::ScopedSpan span(
      recorder_, "compute", "copy to memory", timeline::SpanKind::other);
  thread_.join();
  if (!error_.empty()) return give_up(error_);
  if (!sender_) return;
  sending_thread_ = std::thread([this] { send(written_); });
}

void MemorySaver::wait() {
  finish();
  if (sending_thread_.joinable()) sending_thread_.join();
}

void MemorySaver::after_step(
    TrainingState& state, const CheckpointManifest& now) {
  finish();
  if (failed_) return;
  if (sending_thread_.joinable()) sending_thread_.join();
  if (sending_failed_) sender_.reset();
  held_ns_ = 0;
  const Held held(held_ns_);
  timeline::ScopedSpan span(
      recorder_, "compute", "copy to memory", timeline::SpanKind::other);
  began_ns_ = timeline::steady_now_ns();
  CheckpointManifest manifest = describe_state(now, job_, state);
  manifest.ranks = world_.size();
  try {
    snapshot_.refer_until_update(
        shards_to_save(state, source_, world_, groups_));
  } catch (const std::exception& error) {
    return give_up(error.what());
  }
  sending_ = sender_ != nullptr;
  thread_ =
      std::thread([this, manifest = std::move(manifest)] { write(manifest); });
}

void MemorySaver::write(const CheckpointManifest& manifest) {
  busy_ns_ = 0;
  const Held busy(busy_ns_);
  try {
    written_ = slot_.write(snapshot_.slices(), manifest, generation_);
  } catch (const std::exception& error) {
    error_ = error.what();
  }
}

// A next host that is lost is no reason to stop: the launchers know by
// themselves, and then there is another one.
void MemorySaver::send(const WrittenSlot& slot) {
  const int64_t began = timeline::steady_now_ns();
  try {
    sender_->send(slot);
    sending_ns_ = timeline::steady_now_ns() - began;
  } catch (const std::exception& error) {
    std::fprintf(
        stderr,
        "warning: a copy of the state did not reach the next host, so copies "
        "stay on this one: rank %d: %s\n",
        world_.rank(), error.what());
    sending_failed_ = true;
  }
  sending_ = false;
}

void MemorySaver::give_up(const std::string& error) {
  failed_ = true;
  sending_ = false;
  std::fprintf(
      stderr, "warning: no more copies of the state in memory: rank %d: %s\n",
      world_.rank(), error.c_str());
}

}  // namespace echelon
