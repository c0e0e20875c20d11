#include "echelon/comm/observer.h"

#include <c10/util/Exception.h>

#include <utility>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr auto kPollEvery = std::chrono::milliseconds(500);

bool is_device_failure(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const c10::AcceleratorError&) {
    return true;
  } catch (...) {
    return false;
  }
}

bool already_explained(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const local::Failure&) {
    return false;
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// The cause's text, without a C++ stack and without source positions.
std::string text_of(const std::exception_ptr& cause) {
  std::string text;
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
    text = "an exception of unknown type";
  }
  if (!text.empty() && text[0] == '[') {
    const size_t end = text.find("] ");
    if (end != std::string::npos) text = text.substr(end + 2);
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

}  // namespace

ObservedCalls::ObservedCalls(std::vector<ObservedCall> calls_)
    : calls(std::move(calls_)), group(*calls.front().group) {
  for (auto& call : calls) call.group = &group;
}

Observer::~Observer() {
  {
    const std::lock_guard lock(watch_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Observer::begin(ObservedCall& call) {
  call.ticket = history_.begin(call.record);
  call.begun = std::chrono::steady_clock::now();
  std::lock_guard lock(mutex_);
  ++status_.num_running;
  status_.last_begun = StatusEntry(call.record);
  if (call.collective && call.group->number < RankStatus::kGroups) {
    status_.begun[call.group->number] = call.record.sequence + 1;
  }
  board_->publish(rank_, status_);
}

void Observer::end(ObservedCalls& calls, bool failed) {
  if (calls.ended.exchange(true)) return;
  for (const auto& call : calls.calls) {
    history_.end(call.ticket, failed);
    const std::lock_guard lock(mutex_);
    if (status_.num_running > 0) --status_.num_running;
    if (!failed) {
      ++status_.num_finished;
      status_.last_finished = StatusEntry(call.record);
    }
    board_->publish(rank_, status_);
  }
}

std::exception_ptr
Observer::fail(ObservedCalls& calls, const std::exception_ptr& cause) {
  const std::lock_guard lock(calls.mutex);
  // A device that is lost fails what comes after, each call in its own way.
  const std::exception_ptr earlier = lost();
  if (!calls.error) {
    calls.error = earlier ? earlier : explain(calls.calls.front(), cause);
  }
  end(calls, true);
  return calls.error;
}

void Observer::on_lost(Lost lost) {
  const std::lock_guard lock(watch_mutex_);
  on_lost_ = std::move(lost);
}

std::exception_ptr Observer::lost() const {
  const std::lock_guard lock(watch_mutex_);
  return lost_;
}

void Observer::watch(
    std::shared_ptr<ObservedCalls> calls, std::chrono::milliseconds timeout) {
  const auto deadline = calls->calls.front().begun + timeout;
  const std::lock_guard lock(watch_mutex_);
  watched_.push_back({std::move(calls), deadline});
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Observer::stop_watching() {
  const std::lock_guard lock(watch_mutex_);
  watched_.clear();
}

// Works are asked and destroyed without the lock: both may call the driver.
void Observer::poll(bool all) {
  std::list<Watched> open;
  {
    const std::lock_guard lock(watch_mutex_);
    if (lost_) return;
    open.swap(watched_);
  }
  const auto now = std::chrono::steady_clock::now();
  for (auto one = open.begin(); one != open.end();) {
    std::exception_ptr cause;
    bool over = false;
    c10::intrusive_ptr<c10d::Work> asked;
    {
      const std::lock_guard lock(one->calls->mutex);
      asked = one->calls->asked;
    }
    try {
      over = one->calls->ended || asked->isCompleted();
      if (over) cause = asked->exception();
    } catch (...) {
      cause = std::current_exception();
    }
    if (!over && !cause && now >= one->deadline) {
      cause = std::make_exception_ptr(
          std::runtime_error("the device has not finished it in time"));
    }
    if (cause) {
      lose(*one, cause);
      return;
    }
    if (!over && !all) break;
    if (over) end(*one->calls);
    one = over ? open.erase(one) : std::next(one);
  }
  const std::lock_guard lock(watch_mutex_);
  watched_.splice(watched_.begin(), open);
}

void Observer::lose(Watched& watched, const std::exception_ptr& cause) {
  const auto error = fail(*watched.calls, cause);
  Lost lost;
  {
    const std::lock_guard lock(watch_mutex_);
    if (lost_) return;
    lost_ = error;
    lost = on_lost_;
  }
  if (lost) lost(error);
}

void Observer::run() {
  std::unique_lock lock(watch_mutex_);
  while (!stop_) {
    wake_.wait_for(lock, kPollEvery, [this] { return stop_; });
    if (stop_ || watched_.empty()) continue;
    lock.unlock();
    poll(/*all=*/true);
    lock.lock();
  }
}

std::exception_ptr Observer::explain(
    const ObservedCall& call, const std::exception_ptr& cause) const {
  if (already_explained(cause)) return cause;
  const StatusEntry entry(call.record);
  const auto waited = std::chrono::steady_clock::now() - call.begun;
  const bool device_failed = is_device_failure(cause);
  std::string hang;
  if (call.collective && !device_failed) {
    try {
      std::vector<std::optional<RankStatus>> statuses;
      for (int rank : call.group->ranks) statuses.push_back(board_->read(rank));
      hang = hang_report(
          {.call = entry,
           .group = call.group->number,
           .ranks = call.group->ranks,
           .rank = rank_,
           .waited_seconds = std::chrono::duration<double>(waited).count()},
          statuses);
    } catch (const CommError& error) {
      hang = std::string("\n  ") + error.what();
    }
  }
  const auto milliseconds =
      std::chrono::duration_cast<std::chrono::milliseconds>(waited).count();
  const std::string text = format(
      "{} on axis {}, {} {}, failed after {:g} s: {}{}", entry.describe(),
      call.record.axis, call.record.dtype, shape_text(call.record.shape),
      static_cast<double>(milliseconds) / 1000, text_of(cause), hang);
  return device_failed ? std::make_exception_ptr(DeviceError(text))
                       : std::make_exception_ptr(CommError(text));
}

}  // namespace echelon
