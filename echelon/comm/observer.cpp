#include "echelon/comm/observer.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <optional>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
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

}  // namespace

Observer::Observer(int rank, std::shared_ptr<StatusBoard> board)
    : rank_(rank), board_(std::move(board)) {}

void Observer::begin(ObservedCall& call) {
  call.ticket = history_.begin(call.record);
  call.record.begin_ns = now_ns();
  std::lock_guard lock(mutex_);
  ++status_.num_running;
  status_.last_begun.set(
      call.record.sequence, call.record.operation, call.record.axis,
      call.record.label);
  if (call.collective && call.group->number < RankStatus::kGroups) {
    status_.begun[call.group->number] = call.record.sequence + 1;
  }
  board_->publish(rank_, status_);
}

void Observer::end(const ObservedCall& call, bool failed) {
  history_.end(call.ticket, failed);
  std::lock_guard lock(mutex_);
  if (status_.num_running > 0) --status_.num_running;
  if (!failed) {
    ++status_.num_finished;
    status_.last_finished.set(
        call.record.sequence, call.record.operation, call.record.axis,
        call.record.label);
  }
  board_->publish(rank_, status_);
}

std::string Observer::hang_of(const ObservedCall& call) const {
  if (!call.collective) return "";
  WaitingCall waiting{
      .sequence = call.record.sequence,
      .operation = call.record.operation,
      .axis = call.record.axis,
      .label = call.record.label,
      .group = call.group->number,
      .ranks = call.group->ranks,
      .rank = rank_,
      .waited_seconds =
          static_cast<double>(now_ns() - call.record.begin_ns) * 1e-9};
  std::vector<std::optional<RankStatus>> statuses;
  for (int rank : call.group->ranks) statuses.push_back(board_->read(rank));
  return hang_report(waiting, statuses);
}

std::exception_ptr Observer::explain(
    const ObservedCall& call, const std::exception_ptr& cause) const {
  if (already_explained(cause)) return cause;
  StatusEntry entry;
  entry.set(
      call.record.sequence, call.record.operation, call.record.axis,
      call.record.label);
  const auto milliseconds = (now_ns() - call.record.begin_ns) / 1'000'000;
  return std::make_exception_ptr(CommError(format(
      "{} on axis {}, {} {}, failed after {:g} s: {}{}", entry.describe(),
      call.record.axis, call.record.dtype, shape_text(call.record.shape),
      static_cast<double>(milliseconds) / 1000, text_of(cause),
      hang_of(call))));
}

}  // namespace echelon
