// Three kinds of threads run a lane's front operation, whichever gets there
// first:
//
//   thread           runs                                 when it must wait
//   issuing thread   its operation, to the first wait     returns, or waits
//   waiting thread   the lane of its operation            yields 1 ms, sleeps
//   progress thread  listed lanes that nobody waits in    yields a bit, sleeps
//
// The progress thread announces its state in its doorbell:
//
//   state      meaning                                  who rings
//   awake      runs lanes, or looks for one             nobody
//   idle       sleeps; no lane is left to it            this rank's threads
//   expecting  sleeps, at most kSleepLimit, for a peer  peers too
//
// Invariants:
//   1. Only the front of a lane runs, on the one thread that set busy_.
//   2. A lane that holds operations has a thread that will run it: the issuing
//      thread until it lists the lane, a waiting thread (helpers_ > 0), or the
//      progress thread, which keeps a lane listed until it is empty.
//   3. The progress thread leaves a lane with a helper alone, so a synchronous
//      call costs one wake-up, not two. The last helper that leaves operations
//      behind lists the lane.
//   4. A sleeper announces itself (sequentially consistent), then looks at its
//      lanes under their locks, then sleeps on the ring count that it read
//      before. Whoever makes a front ready changes the word first and rings
//      after. So no wake-up is lost: a thread that lets go of a lane does so
//      before that look, which then sees the lane, or after it, and then
//      whatever makes the front ready comes later still and rings.
//   5. error_ is set before on_done is called, and on_done has returned before
//      done() is true.
//   6. Once a group has failed, none of its tasks is resumed; an operation ends
//      only after quiesce(), since its memory may be freed then.
#include "echelon/comm/shared_memory/engine.h"

#include <pthread.h>

#include <algorithm>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/text/format.h"

namespace echelon::local {
namespace {
thread_local bool progress_thread = false;
}

bool Operation::wait(std::chrono::milliseconds limit) {
  if (done()) {
    return true;
  }
  if (Engine::on_progress_thread()) {
    throw CommError(format(
        "[local] wait() for {} in a completion callback would wait for "
        "itself; wait on another thread",
        name));
  }
  return engine_->wait(shared_from_this(), limit);
}

bool Engine::on_progress_thread() {
  return progress_thread;
}

Engine::Engine(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)), rank_(rank) {}

Engine::~Engine() = default;

void Engine::start() {
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
}

void Engine::stop() {
  stop_.store(true, std::memory_order_seq_cst);
  segment_->rank(rank_).engine.ring();
  if (!thread_.joinable()) {
    return;
  }
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Engine::ring(int r) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  auto& block = segment_->rank(r);
  // A progress thread without pending operations has nothing to hear.
  if (block.engine.sleepers.load() == Doorbell::expecting) {
    block.engine.ring();
  }
  if (block.waiters.sleepers.load() != 0) {
    block.waiters.ring();
  }
}

void Engine::ring_self() {
  wake_engine();
  wake_waiters();
}

void Engine::wake_engine() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  auto& bell = segment_->rank(rank_).engine;
  if (bell.sleepers.load() != Doorbell::awake) {
    bell.ring();
  }
}

void Engine::wake_waiters() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  auto& bell = segment_->rank(rank_).waiters;
  if (bell.sleepers.load() != 0) {
    bell.ring();
  }
}

void Engine::enqueue(
    const std::shared_ptr<Lane>& lane, const OperationPtr& operation) {
  operation->issued_ = Operation::Clock::now();
  operation->engine_ = this;
  operation->lane_ = lane;
  std::lock_guard lock(lane->mutex_);
  lane->queue_.push_back(operation);
}

void Engine::begin(const OperationPtr& operation, bool async) {
  step(*operation->lane_, false, operation.get());
  if (operation->done()) {
    return;
  }
  if (async) {
    list(operation->lane_);
  } else {
    wait(operation, {});
  }
}

void Engine::list(const std::shared_ptr<Lane>& lane) {
  {
    std::lock_guard lock(mutex_);
    std::lock_guard lane_lock(lane->mutex_);
    if (!lane->queue_.empty() && !lane->listed_) {
      lane->listed_ = true;
      lanes_.push_back(lane);
      version_.fetch_add(1, std::memory_order_seq_cst);
    }
  }
  wake_engine();
}

// Runs the lane until its front must wait, or until `until` has had its turn.
bool Engine::step(Lane& lane, bool look_at_clock, const Operation* until) {
  bool progressed = false;
  for (bool more = true; more;) {
    OperationPtr operation;
    std::exception_ptr error;
    {
      std::lock_guard lock(lane.mutex_);
      if (lane.busy_ || lane.queue_.empty()) {
        return progressed;
      }
      operation = lane.queue_.front();
      error = obstacle(*operation, look_at_clock);
      if (error == nullptr && operation->started_ && !operation->task.ready()) {
        return progressed;
      }
      lane.busy_ = true;
    }
    const bool over = error != nullptr || resume(*operation, error);
    if (over) {
      operation->error_ = error;
      operation->task.reset();
    }
    {
      std::lock_guard lock(lane.mutex_);
      lane.busy_ = false;
      if (over) {
        lane.queue_.pop_front();
      }
      more = !lane.queue_.empty();
    }
    if (over) {
      finish(operation);
    }
    progressed = true;
    if (operation.get() == until) {
      // Other threads may have passed by while this one held the lane.
      if (more) {
        ring_self();
      }
      return true;
    }
  }
  return progressed;
}

// Returns why the operation cannot continue, or null.
std::exception_ptr
Engine::obstacle(const Operation& operation, bool look_at_clock) {
  auto& group = *operation.group;
  std::exception_ptr error;
  if (group.failed()) {
    error = group.failure(operation);
  } else if (look_at_clock && operation.started_ && !operation.task.ready()) {
    error = group.peer_left(operation);
    // What the peer did before it left is visible now.
    if (error != nullptr && operation.task.ready()) {
      return nullptr;
    }
    if (error == nullptr && operation.timeout.count() > 0 &&
        Operation::Clock::now() - operation.issued_ > operation.timeout) {
      error = group.expire(operation);
    }
  }
  if (error != nullptr) {
    group.quiesce();
  }
  return error;
}

// True when the operation is over; `error` is then what it ended with.
bool Engine::resume(Operation& operation, std::exception_ptr& error) {
  operation.started_ = true;
  operation.task.resume();
  if (!operation.task.done()) {
    return false;
  }
  error = operation.task.error();
  if (error != nullptr && operation.group->failed()) {
    operation.group->quiesce();
    error = operation.group->failure(operation);
  }
  return true;
}

void Engine::finish(const OperationPtr& operation) {
  if (auto on_done = std::move(operation->on_done)) {
    on_done(*operation);
  }
  operation->done_.store(1, std::memory_order_seq_cst);
  auto& waiters = segment_->rank(rank_).waiters;
  if (waiters.sleepers.load() != 0) {
    waiters.ring();
  }
}

// Runs the operation's lane until the operation is done or the time is over.
// Between attempts it spins, then yields, then sleeps as invariant 4 says.
// helpers_ keeps the progress thread away meanwhile.
bool Engine::wait(
    const OperationPtr& operation, std::chrono::milliseconds limit) {
  const auto lane = operation->lane_;
  const auto begin = Operation::Clock::now();
  auto& bell = segment_->rank(rank_).waiters;
  {
    std::lock_guard lock(lane->mutex_);
    ++lane->helpers_;
  }
  int idle = 0;
  auto idle_since = begin;
  bool in_time = true;
  while (!operation->done() && in_time) {
    if (step(*lane, idle >= kSpins, operation.get())) {
      idle = 0;
      idle_since = Operation::Clock::now();
    } else if (!idle_step(idle)) {
      const bool sleeps =
          Operation::Clock::now() - idle_since >= kYieldingOfCaller;
      if (sleeps) {
        const uint32_t seen = bell.rings.load();
        bell.sleepers.fetch_add(1);
        if (!operation->done() && !actionable(*lane)) {
          bell.sleep(seen, kSleepLimit);
        }
        bell.sleepers.fetch_sub(1);
      }
      idle = kSpins + (sleeps ? kYields / 2 : 0);
    }
    // On a crowded core a yield may take milliseconds.
    in_time = limit.count() <= 0 || Operation::Clock::now() - begin < limit;
  }
  bool more = false;
  {
    std::lock_guard lock(lane->mutex_);
    more = --lane->helpers_ == 0 && !lane->queue_.empty();
  }
  if (more) {
    list(lane);
  }
  return operation->done();
}

// Returns whether the front could run now.
bool Engine::actionable(Lane& lane) {
  std::lock_guard lock(lane.mutex_);
  if (lane.busy_ || lane.queue_.empty()) {
    return false;
  }
  const auto& front = *lane.queue_.front();
  return !front.started_ || front.group->failed() || front.task.ready();
}

// Whether anything is left to the progress thread. Forgets empty lanes.
bool Engine::expecting(std::vector<std::shared_ptr<Lane>>& lanes) {
  std::lock_guard lock(mutex_);
  bool any = false;
  std::erase_if(lanes_, [&](const std::shared_ptr<Lane>& lane) {
    std::lock_guard lane_lock(lane->mutex_);
    lane->listed_ = !lane->queue_.empty();
    any |= lane->listed_ && lane->helpers_ == 0;
    return !lane->listed_;
  });
  lanes = lanes_;
  return any;
}

void Engine::run() {
  progress_thread = true;
  pthread_setname_np(pthread_self(), "echelon-local");
  auto& bell = segment_->rank(rank_).engine;
  std::vector<std::shared_ptr<Lane>> lanes;
  uint64_t version = ~uint64_t{0};
  int idle = 0;
  while (!stop_.load()) {
    if (version_.load() != version) {
      version = version_.load();
      expecting(lanes);
    }
    bool progressed = false;
    for (const auto& lane : lanes) {
      progressed |= !has_helper(*lane) && step(*lane, idle >= kSpins);
    }
    if (progressed) {
      idle = 0;
    } else if (!idle_step(idle)) {
      const uint32_t seen = bell.rings.load();
      const bool pending = expecting(lanes);
      bell.sleepers.store(pending ? Doorbell::expecting : Doorbell::idle);
      const bool work =
          std::any_of(lanes.begin(), lanes.end(), [&](const auto& lane) {
            return !has_helper(*lane) && actionable(*lane);
          });
      if (!work && !stop_.load() && version_.load() == version &&
          expecting(lanes) == pending) {
        bell.sleep(seen, pending ? kSleepLimit : std::chrono::milliseconds(0));
      }
      bell.sleepers.store(Doorbell::awake);
      idle = kSpins + kYields / 2;
    }
  }
}

bool Engine::has_helper(Lane& lane) {
  std::lock_guard lock(lane.mutex_);
  return lane.helpers_ > 0;
}

}  // namespace echelon::local
