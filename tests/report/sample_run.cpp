#include "tests/report/sample_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

namespace echelon::report::sample {
namespace {

constexpr int64_t kMs = 1'000'000;

class Ranks {
 public:
  Ranks(const RunShape& shape, timeline::Timeline& timeline)
      : shape_(shape), timeline_(timeline), random_(7) {}

  // Returns when the step has ended on all ranks, which wait for each other in
  // every all-reduce.
  int64_t step(int64_t step, int64_t begin, double stretch) {
    std::vector<int64_t> now(shape_.ranks, begin);
    std::vector<int64_t> ready(shape_.buckets, begin);
    for (int32_t r = 0; r < shape_.ranks; ++r) {
      const bool last = r == shape_.ranks - 1 && shape_.ranks > 1;
      slowness_ = stretch * (last ? 1 + shape_.slow_rank : 1);
      now[r] =
          add(r, step, "next batch", timeline::SpanKind::data, now[r], 0.35);
      now[r] =
          layers(r, step, "forward", timeline::SpanKind::forward, now[r], 6);
      const int64_t from = now[r];
      now[r] =
          layers(r, step, "backward", timeline::SpanKind::backward, now[r], 11);
      for (int b = 0; b < shape_.buckets; ++b) {
        const int64_t at = from + (now[r] - from) * (b + 1) / shape_.buckets;
        launched_.push_back(at);
        ready[b] = std::max(ready[b], at);
      }
    }
    const int64_t reduced = shape_.ranks > 1 ? reduce(step, ready) : begin;
    int64_t end = 0;
    for (int32_t r = 0; r < shape_.ranks; ++r) {
      slowness_ = stretch;
      const int64_t from = std::max(now[r], reduced);
      end = std::max(
          end, add(r, step, "adam", timeline::SpanKind::optimizer, from, 1.4));
    }
    launched_.clear();
    return end;
  }

 private:
  int64_t jittered(double ms) {
    std::uniform_real_distribution<double> jitter(0.95, 1.05);
    return static_cast<int64_t>(ms * slowness_ * jitter(random_) * kMs);
  }

  int64_t
  add(int32_t rank, int64_t step, std::string name, timeline::SpanKind kind,
      int64_t begin, double ms) {
    const int64_t end = begin + jittered(ms);
    timeline_.spans.push_back(
        {rank, "compute", std::move(name), kind, begin, end, step, 0});
    return end;
  }

  int64_t layers(
      int32_t rank, int64_t step, const std::string& name,
      timeline::SpanKind kind, int64_t begin, double ms) {
    for (int i = 0; i < shape_.layers; ++i) {
      const auto suffix =
          shape_.layers == 1 ? "" : " layer " + std::to_string(i);
      begin = add(rank, step, name + suffix, kind, begin, ms / shape_.layers);
    }
    return begin;
  }

  int64_t reduce(int64_t step, const std::vector<int64_t>& ready) {
    int64_t free = 0;
    for (int b = 0; b < shape_.buckets; ++b) {
      const int64_t end = std::max(ready[b], free) +
                          kMs * 12 / shape_.buckets * (b == 0 ? 2 : 3) / 3;
      for (int32_t r = 0; r < shape_.ranks; ++r) {
        const int64_t begin = std::max(launched_[r * shape_.buckets + b], free);
        timeline_.spans.push_back(
            {r, "comm", "all_reduce bucket " + std::to_string(b),
             timeline::SpanKind::communication, begin, end, step, 4 << 20});
      }
      free = end;
    }
    return free;
  }

  RunShape shape_;
  timeline::Timeline& timeline_;
  std::mt19937_64 random_;
  double slowness_ = 1;
  std::vector<int64_t> launched_;
};

void add_metrics(const RunShape& shape, ReportInput& input) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> noise(0, 1);
  const auto steps = static_cast<double>(shape.steps);
  for (int64_t step = 1; step <= shape.steps; ++step) {
    const double at = static_cast<double>(step) / steps;
    timeline::StepMetrics m;
    m.step = step;
    m.epoch = 12 * at;
    const double clean = 0.045 + 2.26 * std::exp(-9 * at) + 0.1 * (1 - at);
    m.loss = clean * std::exp(0.16 * noise(random));
    m.step_seconds = 0.0262 * std::exp(0.04 * noise(random));
    if (step == 1) m.step_seconds *= 6;
    m.data_seconds = 0.0004;
    m.samples_per_second = 512 / m.step_seconds;
    const double warmup = std::min(1.0, at / 0.06);
    m.learning_rate = 1e-3 * warmup * 0.5 * (1 + std::cos(3.14159 * at));
    m.grad_norm =
        (0.4 + 3.2 * std::exp(-7 * at)) * std::exp(0.2 * noise(random));
    m.slowest_rank = shape.ranks - 1;
    input.metrics.push_back(m);
    if (step % std::max<int64_t>(1, shape.steps / 12) == 0) {
      input.evaluations.push_back(
          {.step = step,
           .epoch = m.epoch,
           .samples = 360,
           .accuracy = 0.983 - 0.72 * std::exp(-8 * at),
           .loss = 0.071 + 2.1 * std::exp(-8.4 * at),
           .seconds = 0.04});
    }
  }
}

}  // namespace

ReportInput run(const RunShape& shape) {
  ReportInput input;
  input.title = "simple_cnn on digits";
  input.facts = {
      {"Model", "simple_cnn, 2 convolutions, 1 linear layer"},
      {"Parameters", "6,090"},
      {"Data", "digits, 1,437 to train on, 360 held out"},
      {"Layout", "dp=" + std::to_string(shape.ranks)},
      {"Ranks", std::to_string(shape.ranks) + " processes on one host"},
      {"Backend", "local"},
      {"Device", "cpu, 1 thread per rank"},
      {"Global batch", "512"},
      {"Optimizer", "adam, learning rate 1e-3, cosine after warm-up"},
      {"Seed", "0"}};
  add_metrics(shape, input);
  input.timeline.title = input.title;
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    input.timeline.rank_names.push_back(
        "rank " + std::to_string(rank) + " (cpu)");
  }
  Ranks ranks(shape, input.timeline);
  int64_t now = 0;
  for (int64_t step = 1; step <= shape.recorded_steps; ++step) {
    now = ranks.step(step, now, step == 1 ? 4 : 1) + kMs / 4;
  }
  return input;
}

ReportInput run_with_memory(const RunShape& shape) {
  constexpr int64_t kMiB = 1 << 20;
  ReportInput input = run(shape);
  for (int32_t rank = 0; rank < shape.ranks; ++rank) {
    timeline::RankMemory memory{
        .rank = rank, .planned_bytes = 1150 * kMiB, .limit_bytes = 1500 * kMiB};
    timeline::MemoryByKind now;
    now[timeline::MemoryKind::parameters] = 120 * kMiB;
    now[timeline::MemoryKind::optimizer_state] = 240 * kMiB;
    for (const auto& span : input.timeline.spans) {
      if (span.rank != rank || span.track != "compute") continue;
      const bool forward = span.kind == timeline::SpanKind::forward;
      if (!forward && span.kind != timeline::SpanKind::backward) continue;
      for (int i = 0; i <= 40; ++i) {
        const int part = forward ? i : 40 - i;
        now[timeline::MemoryKind::activations] = (12 + rank) * part * kMiB;
        now[timeline::MemoryKind::gradients] = forward ? 0 : 3 * i * kMiB;
        now[timeline::MemoryKind::unsharded] = 30 * kMiB;
        now[timeline::MemoryKind::working] = (i % 4) * 20 * kMiB;
        memory.samples.push_back(
            {span.begin_ns + (span.end_ns - span.begin_ns) * i / 41, now});
      }
    }
    input.timeline.memory.push_back(std::move(memory));
  }
  return input;
}

ReportInput hostile() {
  auto input = run({.steps = 40, .ranks = 2});
  const std::string text =
      "<script>document.title='run'</script>\"' onload=x &amp; \x01\xff "
      "</title></style><b>";
  input.title = text + std::string(300, 'w');
  input.facts.push_back({text, text + std::string(400, 'x')});
  input.facts.push_back({std::string(200, 'W'), ""});
  input.outcome = "stopped: " + text + std::string(200, 'W');
  input.timeline.rank_names[0] = text;
  for (auto& span : input.timeline.spans) span.name += text;
  input.metrics[20].loss = std::numeric_limits<double>::quiet_NaN();
  input.metrics[21].loss = std::numeric_limits<double>::infinity();
  input.metrics[22].samples_per_second = 1e300;
  return input;
}

ReportInput with_timeline(timeline::Timeline timeline) {
  auto input = run({.steps = 40});
  input.timeline = std::move(timeline);
  return input;
}

StepPrediction prediction_of(const timeline::Timeline& timeline) {
  StepPrediction prediction{.cluster = "h100-sxm:1x8"};
  timeline::TimedParts& parts = prediction.parts;
  parts = timeline::timed_parts(timeline, timeline::diagnose(timeline));
  parts.forward *= 0.95;
  parts.backward *= 0.8;
  parts.optimizer *= 1.2;
  parts.data = 0;
  for (auto& [axis, seconds] : parts.exposed) seconds *= 0.5;
  parts.stages *= 0.7;
  parts.other = 0;
  prediction.step_seconds = parts.step_seconds();
  prediction.memory = fullest_moments(timeline);
  for (auto& rank : prediction.memory) {
    for (auto& bytes : rank.memory.bytes) bytes -= bytes / 16;
  }
  return prediction;
}

ReportInput with_prediction(ReportInput input) {
  input.prediction = prediction_of(input.timeline);
  return input;
}

}  // namespace echelon::report::sample
