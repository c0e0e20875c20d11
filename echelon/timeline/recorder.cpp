#include "echelon/timeline/recorder.h"

#include <chrono>
#include <utility>

namespace echelon::timeline {

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recorder::Recorder(int32_t rank, int64_t first_step, int64_t num_steps)
    : rank_(rank), first_step_(first_step), num_steps_(num_steps) {}

void Recorder::begin_step(int64_t step) {
  std::lock_guard lock(mutex_);
  step_ = step;
}

bool Recorder::active() const {
  std::lock_guard lock(mutex_);
  return step_ >= first_step_ && step_ < first_step_ + num_steps_;
}

void Recorder::add(Span span) {
  std::lock_guard lock(mutex_);
  if (step_ < first_step_ || step_ >= first_step_ + num_steps_) return;
  span.rank = rank_;
  span.step = step_;
  spans_.push_back(std::move(span));
}

bool Recorder::ended() const {
  std::lock_guard lock(mutex_);
  return step_ >= first_step_ + num_steps_;
}

std::vector<Span> Recorder::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(spans_, {});
}

ScopedSpan::ScopedSpan(
    Recorder* recorder, std::string track, std::string name, SpanKind kind)
    : recorder_(recorder && recorder->active() ? recorder : nullptr) {
  if (recorder_ == nullptr) return;
  span_.track = std::move(track);
  span_.name = std::move(name);
  span_.kind = kind;
  span_.begin_ns = steady_now_ns();
}

ScopedSpan::~ScopedSpan() {
  if (recorder_ == nullptr) return;
  span_.end_ns = steady_now_ns();
  recorder_->add(std::move(span_));
}

}  // namespace echelon::timeline
