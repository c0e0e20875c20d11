#include "echelon/timeline/recorder.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace echelon::timeline {

int64_t steady_now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recorder::Recorder(
    int32_t rank, int64_t first_step, int64_t num_steps,
    MakeDeviceClock make_clock)
    : rank_(rank),
      first_step_(first_step),
      num_steps_(num_steps),
      make_clock_(std::move(make_clock)) {}

void Recorder::begin_step(int64_t step) {
  std::lock_guard lock(mutex_);
  step_ = step;
  passes_.clear();
  if (records() && make_clock_ && !clock_) clock_ = make_clock_();
}

bool Recorder::active() const {
  std::lock_guard lock(mutex_);
  return records();
}

void Recorder::add(Span span) {
  const Moment begin{span.begin_ns}, end{span.end_ns};
  add(std::move(span), begin, end);
}

void Recorder::add(Span span, Moment begin, Moment end) {
  std::lock_guard lock(mutex_);
  span.rank = rank_;
  // What a device did may be told after its step.
  if (begin.mark) {
    // An earlier clock's are gone.
    if (begin.value < first_mark_ || (end.mark && end.value < first_mark_)) {
      return;
    }
    span.step =
        step_of_mark_.at(static_cast<size_t>(begin.value - first_mark_));
    if (!is_first(span.step) && span.step != also_) return;  // taken
  } else if (records()) {
    span.step = step_;
  } else {
    return;
  }
  spans_.push_back({std::move(span), begin, end});
}

int64_t Recorder::mark_locked(int device) {
  const int64_t mark = clock_->mark(device);
  step_of_mark_.resize(static_cast<size_t>(mark) + 1, step_);
  return first_mark_ + mark;
}

Moment Recorder::now(int device) {
  std::lock_guard lock(mutex_);
  if (clock_ && records()) return {mark_locked(device), true};
  return {steady_now_ns()};
}

int64_t Recorder::mark() {
  std::lock_guard lock(mutex_);
  return clock_ && records() ? mark_locked(-1) : -1;
}

bool Recorder::ended() const {
  std::lock_guard lock(mutex_);
  return step_ >= first_step_ + num_steps_;
}

int64_t Recorder::time_of(const Moment& moment) {
  return moment.mark ? clock_->time_ns(moment.value - first_mark_)
                     : moment.value;
}

Span Recorder::timed(Recorded one) {
  one.span.begin_ns = time_of(one.begin);
  one.span.end_ns = std::max(one.span.begin_ns, time_of(one.end));
  return std::move(one.span);
}

std::vector<Span> Recorder::take() {
  std::lock_guard lock(mutex_);
  std::vector<Span> spans;
  for (Recorded& one : std::exchange(spans_, {})) {
    spans.push_back(timed(std::move(one)));
  }
  return spans;
}

void Recorder::time_parts(
    std::unique_ptr<DeviceTimer> timer, std::function<int64_t()> waited_ns) {
  std::lock_guard lock(mutex_);
  times_parts_ = true;
  timer_ = std::move(timer);
  waited_ns_ = std::move(waited_ns);
}

void Recorder::hold_parts(bool held) {
  std::lock_guard lock(mutex_);
  holds_parts_ = held;
}

std::optional<Recorder::Pass> Recorder::begin_pass(SpanKind kind) {
  if (kind != SpanKind::forward && kind != SpanKind::backward &&
      kind != SpanKind::optimizer) {
    return std::nullopt;
  }
  std::lock_guard lock(mutex_);
  if (!times_parts_ || holds_parts_) return std::nullopt;
  if (timer_) return Pass{.kind = kind, .begin = timer_->mark()};
  return Pass{
      .kind = kind, .begin = steady_now_ns(), .waited_ns = -waited_ns_()};
}

void Recorder::end_pass(Pass pass) {
  std::lock_guard lock(mutex_);
  pass.end = timer_ ? timer_->mark() : steady_now_ns();
  if (!timer_) pass.waited_ns += waited_ns_();
  passes_.push_back(pass);
}

std::vector<Recorder::Pass> Recorder::take_passes() {
  std::lock_guard lock(mutex_);
  return std::exchange(passes_, {});
}

std::optional<StepParts>
Recorder::parts_of(const std::vector<Pass>& passes, int64_t ended_ns) {
  std::lock_guard lock(mutex_);
  if (passes.empty()) return std::nullopt;
  std::vector<int64_t> times;
  for (const Pass& pass : passes) {
    times.insert(times.end(), {pass.begin, pass.end});
  }
  if (timer_) {
    times = timer_->take_ns(times);
    const int64_t first_ns = ended_ns - times.back();
    for (int64_t& time : times) time += first_ns;
  }
  StepParts parts;
  for (size_t i = 0; i < passes.size(); ++i) {
    const auto& [kind, begin, end, waited_ns] = passes[i];
    StepPart& part = kind == SpanKind::forward    ? parts.forward
                     : kind == SpanKind::backward ? parts.backward
                                                  : parts.update;
    const int64_t begin_ns = times[2 * i], end_ns = times[2 * i + 1];
    if (part.end_ns == 0) part.begin_ns = begin_ns;
    part.end_ns = end_ns;
    part.seconds += static_cast<double>(end_ns - begin_ns - waited_ns) * 1e-9;
  }
  return parts;
}

void Recorder::also_record(int64_t step) {
  std::lock_guard lock(mutex_);
  also_ = step;
}

std::vector<Span> Recorder::take_step(int64_t step) {
  std::lock_guard lock(mutex_);
  std::vector<Span> spans;
  for (const Recorded& one : spans_) {
    if (one.span.step == step) spans.push_back(timed(one));
  }
  if (also_ == step) also_ = -1;
  if (is_first(step)) return spans;
  std::erase_if(
      spans_, [&](const Recorded& one) { return one.span.step == step; });
  // A clock keeps its marks, so a long run gets a new one with each such step.
  if (!clock_ || records()) return spans;
  for (Recorded& one : spans_) {
    one.span = timed(one);
    one.begin = {one.span.begin_ns};
    one.end = {one.span.end_ns};
  }
  first_mark_ += static_cast<int64_t>(step_of_mark_.size());
  step_of_mark_.clear();
  clock_.reset();
  return spans;
}

ScopedSpan::ScopedSpan(
    Recorder* recorder, std::string track, std::string name, SpanKind kind)
    : recorder_(recorder) {
  if (recorder_ == nullptr) return;
  records_ = recorder_->active();
  pass_ = recorder_->begin_pass(kind);
  span_.kind = kind;
  if (!records_) return;
  span_.track = std::move(track);
  span_.name = std::move(name);
  begin_ = recorder_->now();
}

ScopedSpan::~ScopedSpan() {
  if (recorder_ == nullptr) return;
  try {
    if (pass_) recorder_->end_pass(*pass_);
    if (records_) recorder_->add(std::move(span_), begin_, recorder_->now());
  } catch (const std::exception&) {
    // A device that has failed takes no marks. Its error is on its way.
  }
}

}  // namespace echelon::timeline
