#include "echelon/monitoring/job_board.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::monitoring {
namespace {

constexpr size_t kFailureBytes = 400;
constexpr size_t kVisibleBytes = 4096;  // 64 GPUs or MIG slices by UUID

// A text that one process writes and another reads: number `count` is in the
// place count % 2, so that a reader never sees one that is being written.
template <size_t kBytes>
struct SharedText {
  std::atomic<uint64_t> count;  // 0: nothing was written
  std::array<std::array<char, kBytes>, 2> places;

  void write(const std::string& text) {
    const uint64_t number = count + 1;
    auto& place = places[number % 2];
    place.fill('\0');
    std::copy_n(text.data(), std::min(text.size(), kBytes - 1), &place[0]);
    count = number;
  }
  std::string read() const {
    const uint64_t number = count;
    return number > 0 ? places[number % 2].data() : "";
  }
};

}  // namespace

// Zeros are a board on which nothing is written yet.
struct JobBoard::Shared {
  std::atomic<int> first_rank, num_ranks, world_size, num_hosts, generation;
  std::atomic<bool> coordinates;
  std::array<std::atomic<uint64_t>, kNumRestartReasons> restarts;
  std::array<std::atomic<uint64_t>, kRecoveryBounds.size() + 1> recoveries;
  std::atomic<uint64_t> recovery_ns;
  SharedText<kFailureBytes> failure;
  std::atomic<bool> sees_gpus;  // `visible` counts
  SharedText<kVisibleBytes> visible;
  std::atomic<bool> ended;
  std::atomic<int> exit_code;
  std::atomic<uint64_t> checkpoint_ns;
  std::atomic<double> peak_seconds;
};

std::string to_string(RestartReason reason) {
  switch (reason) {
    case RestartReason::rank_failed:
      return "rank_failed";
    case RestartReason::rank_hung:
      return "rank_hung";
    case RestartReason::rank_killed:
      return "rank_killed";
    case RestartReason::out_of_memory:
      return "out_of_memory";
    case RestartReason::host_lost:
      return "host_lost";
    case RestartReason::hosts_changed:
      return "hosts_changed";
    case RestartReason::resized:
      return "resized";
  }
  return "";
}

Durations::Durations(std::vector<double> at)
    : bounds(std::move(at)), numbers(bounds.size() + 1) {}

void Durations::add(double seconds) {
  const auto at = std::ranges::lower_bound(bounds, seconds) - bounds.begin();
  ++numbers[static_cast<size_t>(at)];
  sum += seconds;
}

JobBoard::JobBoard(int most_ranks)
    : most_ranks_(most_ranks),
      bytes_(sizeof(Shared) + static_cast<size_t>(most_ranks) * sizeof(Slot)) {
  void* memory = ::mmap(
      nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
      0);
  if (memory == MAP_FAILED) {
    throw Error(format(
        "[launch] no memory for the figures of {} ranks: {}", most_ranks,
        std::strerror(errno)));
  }
  shared_ = static_cast<Shared*>(memory);
}

JobBoard::~JobBoard() {
  ::munmap(shared_, bytes_);
}

JobBoard::Slot* JobBoard::slots() const {
  return reinterpret_cast<Slot*>(shared_ + 1);
}

int JobBoard::kept_ranks(int num_ranks) const {
  return std::clamp(num_ranks, 0, most_ranks_);
}

void JobBoard::begin(const Generation& generation) {
  for (int i = 0; i < most_ranks_; ++i) {
    Slot& slot = slots()[i];
    slot.up = false;
    slot.pid = 0;
    slot.count = slot.collectives = 0;
    slot.phase = RankPhase::other;
  }
  Shared& board = shared();
  board.first_rank = generation.first_rank;
  board.num_ranks = kept_ranks(generation.num_ranks);
  board.world_size = generation.world_size;
  board.num_hosts = generation.num_hosts;
  board.generation = generation.number;
  board.coordinates = generation.coordinates;
  board.peak_seconds = 0;
  board.visible.write(generation.visible_gpus.value_or(""));
  board.sees_gpus = generation.visible_gpus.has_value();
  seen_checkpoint_ns_ = 0;
  began_ = true;
}

void JobBoard::rank_started(int rank, pid_t pid) {
  if (rank >= most_ranks_) return;
  slots()[rank].pid = pid;
  slots()[rank].up = true;
}

void JobBoard::rank_ended(int rank) {
  if (rank < most_ranks_) slots()[rank].up = false;
}

void JobBoard::set_progress(const std::vector<RankProgress>& ranks) {
  bool progress = false;
  for (int i = 0; i < kept_ranks(static_cast<int>(ranks.size())); ++i) {
    const RankProgress& rank = ranks[static_cast<size_t>(i)];
    progress |= rank.count > 0;
    slots()[i].count = rank.count;
    slots()[i].collectives = rank.collectives;
    slots()[i].phase = rank.phase;
  }
  if (!ranks.empty()) {
    const uint64_t now = ranks[0].checkpoint_ns;
    shared().checkpoint_ns += now - std::exchange(seen_checkpoint_ns_, now);
  }
  // The ranks that stopped have made progress too, before.
  if (!progress || !began_ || !std::exchange(recovers_, false)) return;
  const std::chrono::duration<double> time = Clock::now() - stopped_;
  const auto at = std::ranges::lower_bound(kRecoveryBounds, time.count()) -
                  kRecoveryBounds.begin();
  shared().recovery_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  ++shared().recoveries[static_cast<size_t>(at)];
}

void JobBoard::set_peak_seconds(double seconds) {
  shared().peak_seconds = seconds;
}

void JobBoard::count_restart(RestartReason reason) {
  ++shared().restarts[static_cast<size_t>(reason)];
}

void JobBoard::stop_training() {
  began_ = false;
  if (!std::exchange(recovers_, true)) stopped_ = Clock::now();
}

void JobBoard::note_failure(const std::string& line) {
  shared().failure.write(line);
}

void JobBoard::end(int exit_code) {
  shared().exit_code = exit_code;
  shared().ended = true;
}

JobFacts JobBoard::read() const {
  const Shared& board = shared();
  JobFacts facts;
  facts.coordinates = board.coordinates;
  facts.world_size = board.world_size;
  facts.num_hosts = board.num_hosts;
  facts.generation = board.generation;
  facts.recoveries =
      Durations({kRecoveryBounds.begin(), kRecoveryBounds.end()});
  for (size_t i = 0; i < facts.restarts.size(); ++i) {
    facts.restarts[i] = board.restarts[i];
  }
  for (size_t i = 0; i < board.recoveries.size(); ++i) {
    facts.recoveries.numbers[i] = board.recoveries[i];
  }
  facts.recoveries.sum = static_cast<double>(board.recovery_ns) / 1e9;
  facts.failure = board.failure.read();
  if (board.sees_gpus) facts.visible_gpus = board.visible.read();
  if (board.ended) facts.exit_code = board.exit_code;
  facts.checkpoint_seconds = static_cast<double>(board.checkpoint_ns) / 1e9;
  facts.peak_seconds = board.peak_seconds;
  const int first = board.first_rank;
  for (int i = 0; i < kept_ranks(board.num_ranks); ++i) {
    const Slot& slot = slots()[i];
    facts.ranks.push_back(
        {first + i,
         slot.pid,
         slot.up,
         {slot.count, slot.collectives, slot.phase, 0}});
  }
  return facts;
}

}  // namespace echelon::monitoring
