// A lane's front operation is run by whoever gets there first: the issuing
// thread as far as the first wait, then a thread in Operation::wait, else the
// progress thread. The progress thread leaves lanes with a helper alone, so
// that a synchronous caller costs one wake-up, not two.
//
// Why no wake-up is lost: a sleeper announces itself (sleepers, sequentially
// consistent), then looks at its lanes under their locks, then sleeps on the
// ring count it read before. A thread that finds a lane's front not ready and
// lets go of it did so before or after that look; in the first case the sleeper
// saw the lane, in the second whatever makes the front ready comes later still
// and rings.
#include "echelon/comm/shared_memory/engine.h"

#include <pthread.h>

#include <algorithm>

#include "echelon/comm/shared_memory/failure.h"

namespace echelon::local {
namespace {
thread_local bool progress_thread = false;
}

bool Operation::wait(std::chrono::milliseconds limit) {
  if (done()) {
    return true;
  }
  if (Engine::on_progress_thread()) {
    throw CommError(
        std::string("[local] wait() for ") + name +
        " in a completion callback would wait for itself; wait on another "
        "thread");
  }
  return engine_->wait(shared_from_this(), limit);
}

bool Operation::test() {
  return done() || engine_->test(shared_from_this());
}

void Operation::hurry() {
  if (!done()) {
    engine_->hurry(shared_from_this());
  }
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

void Engine::ring(int r, bool urgent) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  auto& block = segment_->rank(r);
  // An engine without pending operations has nothing to hear from a peer. One
  // that is awake counts its rings before it leaves lazy ones alone.
  if (urgent || block.engine.sleepers.load() == Doorbell::expecting) {
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
  lane->urgent_ += operation->lazy ? 0 : 1;
  lane->had_lazy_ |= operation->lazy;
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
  bool lazy = false;
  {
    std::lock_guard lock(mutex_);
    std::lock_guard lane_lock(lane->mutex_);
    lazy = lane->lazy();
    if (!lane->queue_.empty() && !lane->listed_) {
      lane->listed_ = true;
      lanes_.push_back(lane);
      version_.fetch_add(1, std::memory_order_seq_cst);
    }
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool looks_soon =
      segment_->rank(rank_).engine.sleepers.load() == Doorbell::dozing;
  if (!lazy || !looks_soon) {
    wake_engine();
  }
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
    bool lazy = false;
    {
      std::lock_guard lock(lane.mutex_);
      lane.busy_ = false;
      if (over) {
        lane.queue_.pop_front();
        lane.urgent_ -= operation->lazy ? 0 : 1;
      }
      more = !lane.queue_.empty();
      lazy = lane.lazy();
    }
    if (over) {
      finish(operation);
    }
    progressed = true;
    if (operation.get() == until) {
      // What follows begins now, for its peers.
      if (over && error == nullptr && more && lazy) {
        continue;
      }
      // Others may have passed by while this thread held the lane; to a lazy
      // one the progress thread comes again.
      if (more && lazy) {
        wake_waiters();
      } else if (more) {
        ring_self();
      }
      return true;
    }
  }
  return progressed;
}

// Why the operation cannot go on, or null.
std::exception_ptr
Engine::obstacle(const Operation& operation, bool look_at_clock) {
  auto& group = *operation.group;
  std::exception_ptr error;
  if (group.failed()) {
    error = group.failure(operation);
  } else if (look_at_clock && operation.started_ && !operation.task.ready()) {
    error = group.hopeless(operation);
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
          bell.sleep(seen, kNap);
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

bool Engine::test(const OperationPtr& operation) {
  bool lazy = false;
  {
    std::lock_guard lock(operation->lane_->mutex_);
    lazy = operation->lane_->lazy();
  }
  if (lazy && !on_progress_thread()) {
    step(*operation->lane_, false, operation.get());
  }
  return operation->done();
}

void Engine::hurry(const OperationPtr& operation) {
  const auto lane = operation->lane_;
  {
    std::lock_guard lock(lane->mutex_);
    const auto& queue = lane->queue_;
    if (!operation->lazy ||
        std::find(queue.begin(), queue.end(), operation) == queue.end()) {
      return;
    }
    operation->lazy = false;
    ++lane->urgent_;
  }
  list(lane);
}

int Engine::carry_on(const Supervisor& group) {
  std::vector<std::shared_ptr<Lane>> lanes;
  {
    std::lock_guard lock(mutex_);
    lanes = lanes_;
  }
  int waiting = 0;
  for (const auto& lane : lanes) {
    const auto left = [&] {
      std::lock_guard lock(lane->mutex_);
      const auto& queue = lane->queue_;
      const bool of_group =
          !queue.empty() && queue.front()->group.get() == &group;
      return lane->busy_ || !of_group ? 0 : static_cast<int>(queue.size());
    };
    if (left() == 0) {
      continue;
    }
    step(*lane, false);
    if (!actionable(*lane)) {
      waiting += left();
    }
  }
  return waiting;
}

// The front could run now.
bool Engine::actionable(Lane& lane) {
  std::lock_guard lock(lane.mutex_);
  if (lane.busy_ || lane.queue_.empty()) {
    return false;
  }
  const auto& front = *lane.queue_.front();
  return !front.started_ || front.group->failed() || front.task.ready();
}

// Is anything left to the progress thread; forgets lanes that are empty.
Engine::Left Engine::look(std::vector<std::shared_ptr<Lane>>& lanes) {
  std::lock_guard lock(mutex_);
  Left left;
  std::erase_if(lanes_, [&](const std::shared_ptr<Lane>& lane) {
    std::lock_guard lane_lock(lane->mutex_);
    lane->listed_ = !lane->queue_.empty();
    left.any |= lane->listed_ && lane->helpers_ == 0 && !lane->lazy();
    left.lazy |= lane->had_lazy_;
    lane->had_lazy_ &= lane->listed_;
    return !lane->listed_;
  });
  lanes = lanes_;
  return left;
}

void Engine::run() {
  progress_thread = true;
  pthread_setname_np(pthread_self(), "echelon-local");
  auto& bell = segment_->rank(rank_).engine;
  std::vector<std::shared_ptr<Lane>> lanes;
  uint64_t version = ~uint64_t{0};
  int idle = 0;
  int dozes = 0;  // left since the last lazy operation
  uint32_t heard = bell.rings.load();
  bool lazy = false;  // lazy lanes have their turn
  while (!stop_.load()) {
    if (version_.load() != version) {
      version = version_.load();
      if (look(lanes).lazy) {
        dozes = kDozes;
      }
    }
    // Who rings has a reason, whatever is carried on.
    const uint32_t rings = bell.rings.load();
    lazy |= rings != heard;
    heard = rings;
    bool progressed = false;
    bool progressed_lazy = false;
    for (const auto& lane : lanes) {
      if (left_over(*lane, false)) {
        progressed |= step(*lane, idle >= kSpins);
      } else if (lazy && left_over(*lane, true)) {
        progressed_lazy |= step(*lane, idle >= kSpins);
      }
    }
    lazy = progressed_lazy;  // what was behind
    if (progressed) {
      idle = 0;
    } else if (!progressed_lazy && !idle_step(idle)) {
      const uint32_t seen = bell.rings.load();
      const Left left = look(lanes);
      if (left.lazy) {
        dozes = kDozes;
      }
      bell.sleepers.store(
          left.any    ? Doorbell::expecting
          : dozes > 0 ? Doorbell::dozing
                      : Doorbell::idle);
      const bool work =
          std::any_of(lanes.begin(), lanes.end(), [&](const auto& lane) {
            return left_over(*lane, false) && actionable(*lane);
          });
      const Left now = look(lanes);
      if (!work && !stop_.load() && version_.load() == version &&
          seen == heard && now.any == left.any && (dozes > 0 || !now.lazy)) {
        bell.sleep(
            seen, dozes > 0  ? kDoze
                  : left.any ? kNap
                             : std::chrono::milliseconds(0));
        dozes = std::max(0, dozes - 1);
        lazy = true;
      }
      bell.sleepers.store(Doorbell::awake);
      idle = kSpins + (left.any ? kYields / 2 : kYields);
    }
  }
}

// Nobody else carries it, and its turn has come.
bool Engine::left_over(Lane& lane, bool with_lazy) {
  std::lock_guard lock(lane.mutex_);
  return lane.helpers_ == 0 && (with_lazy || !lane.lazy());
}

}  // namespace echelon::local
