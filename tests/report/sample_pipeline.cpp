#include "tests/report/sample_pipeline.h"

#include <algorithm>
#include <random>
#include <utility>

namespace echelon::report::sample {
namespace {

constexpr double kForwardNs = 2e6;

using Row = std::vector<timeline::PipelineBlock>;

timeline::PipelineBlock block(
    timeline::BlockKind kind, int32_t row, int32_t stage, int32_t microbatch) {
  return {.row = row, .kind = kind, .stage = stage, .microbatch = microbatch};
}

Row gpipe(int32_t row, int32_t count) {
  Row blocks;
  for (const auto kind :
       {timeline::BlockKind::forward, timeline::BlockKind::backward}) {
    for (int32_t m = 0; m < count; ++m) {
      blocks.push_back(block(kind, row, row, m));
    }
  }
  return blocks;
}

// With `split`, weights' gradients follow as soon as nothing else is urgent.
Row one_f_one_b(int32_t row, int32_t ranks, int32_t count, bool split) {
  Row blocks;
  const int32_t warmup = std::min(count, ranks - row);
  int32_t forwards = 0;
  int32_t weights = 0;
  for (; forwards < warmup; ++forwards) {
    blocks.push_back(block(timeline::BlockKind::forward, row, row, forwards));
  }
  for (int32_t m = 0; m < count; ++m) {
    blocks.push_back(block(
        split ? timeline::BlockKind::backward_input
              : timeline::BlockKind::backward,
        row, row, m));
    if (split && m >= row) {
      blocks.push_back(
          block(timeline::BlockKind::backward_weight, row, row, weights++));
    }
    if (forwards < count) {
      blocks.push_back(
          block(timeline::BlockKind::forward, row, row, forwards++));
    }
  }
  while (split && weights < count) {
    blocks.push_back(
        block(timeline::BlockKind::backward_weight, row, row, weights++));
  }
  return blocks;
}

// Two stages a rank, all forwards first.
Row interleaved(int32_t row, int32_t ranks, int32_t count) {
  Row blocks;
  for (const bool forward : {true, false}) {
    for (int32_t from = 0; from < count; from += ranks) {
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t chunk = forward ? half : 1 - half;
        for (int32_t m = from; m < std::min(count, from + ranks); ++m) {
          blocks.push_back(block(
              forward ? timeline::BlockKind::forward
                      : timeline::BlockKind::backward,
              row, row + chunk * ranks, m));
          blocks.back().chunk = chunk;
        }
      }
    }
  }
  return blocks;
}

Row order_of(const PipelineShape& shape, int32_t row) {
  switch (shape.order) {
    case Order::gpipe:
      return gpipe(row, shape.microbatches);
    case Order::interleaved:
      return interleaved(row, shape.ranks, shape.microbatches);
    default:
      return one_f_one_b(
          row, shape.ranks, shape.microbatches, shape.order == Order::split);
  }
}

void add_step(
    const PipelineShape& shape, timeline::Timeline& timeline,
    std::mt19937_64& random, int64_t step, int64_t origin, int32_t replica) {
  std::uniform_real_distribution<double> jitter(0.92, 1.1);
  const double slower = step == 1 ? 3 : 1;
  const auto blocks = timeline::replayed(
      pipeline_order(shape), [&](const timeline::PipelineBlock& b) {
        const double work = b.kind == timeline::BlockKind::backward ? 1.9 : 1.0;
        const double stage = b.row == 1 ? 1 + shape.slow_stage : 1;
        return slower * work * stage * jitter(random) + shape.latency;
      });
  for (const auto& b : *blocks) {
    const auto at = [&](double forwards) {
      return origin + static_cast<int64_t>(kForwardNs * forwards);
    };
    const bool forward = b.kind == timeline::BlockKind::forward;
    timeline::Span span{
        .rank = b.row * shape.replicas + replica,
        .track = "compute",
        .name =
            format("{}{}{}", b.stage, timeline::letter(b.kind), b.microbatch),
        .kind = forward ? timeline::SpanKind::forward
                        : timeline::SpanKind::backward,
        .begin_ns = at(b.begin),
        .end_ns = at(b.end - shape.latency),
        .step = step};
    timeline.spans.push_back(span);
    if (!shape.transfers || b.kind == timeline::BlockKind::backward_weight)
      continue;
    span.track = "comm";
    span.name = "send " + span.name;
    span.kind = timeline::SpanKind::communication;
    span.begin_ns = span.end_ns;
    span.end_ns = at(b.end);
    span.bytes = 1 << 20;
    timeline.spans.push_back(span);
  }
}

}  // namespace

timeline::PipelineRows pipeline_order(const PipelineShape& shape) {
  timeline::PipelineRows result;
  for (int32_t row = 0; row < shape.ranks; ++row) {
    result.rows.push_back({format("rank {}", row), 0});
    double place = 0;
    for (auto& b : order_of(shape, row)) {
      b.begin = place;
      b.end = ++place;
      result.blocks.push_back(b);
    }
  }
  return result;
}

PipelinePicture schedule_picture(const PipelineShape& shape) {
  auto order = pipeline_order(shape);
  auto blocks = timeline::ideal_blocks(order);
  return {
      .id = "schedule",
      .title = "1f1b <4 stages>",
      .rows = std::move(order.rows),
      .blocks = std::move(*blocks),
      .unit = "forwards"};
}

timeline::Timeline pipeline_run(const PipelineShape& shape) {
  timeline::Timeline timeline;
  timeline.title = "a pipeline";
  for (int32_t rank = 0; rank < shape.ranks * shape.replicas; ++rank) {
    timeline.rank_names.push_back(format("rank {} (cpu)", rank));
  }
  std::mt19937_64 random(5);
  int64_t origin = 0;
  for (int64_t step = 1; step <= shape.steps; ++step) {
    for (int32_t replica = 0; replica < shape.replicas; ++replica) {
      add_step(shape, timeline, random, step, origin, replica);
    }
    for (const auto& span : timeline.spans) {
      origin = std::max(origin, span.end_ns);
    }
    origin += 500'000;
  }
  return timeline;
}

timeline::Timeline placement_run(int32_t devices, int64_t steps) {
  timeline::Timeline timeline;
  timeline.title = "a model on several devices";
  timeline.rank_names = {"rank 0 (cpu)"};
  int64_t now = 0;
  const auto add = [&](int32_t device, bool forward, int64_t step, double ms) {
    const int64_t end = now + static_cast<int64_t>(1e6 * ms);
    timeline.spans.push_back(
        {.track = format("device {}", device),
         .name = forward ? "forward" : "backward",
         .kind = forward ? timeline::SpanKind::forward
                         : timeline::SpanKind::backward,
         .begin_ns = now,
         .end_ns = end,
         .step = step});
    now = end + 200'000;
  };
  for (int64_t step = 1; step <= steps; ++step) {
    for (int32_t d = 0; d < devices; ++d) add(d, true, step, 2 + 0.4 * d);
    for (int32_t d = devices; d-- > 0;) add(d, false, step, 4 + 0.6 * d);
  }
  return timeline;
}

}  // namespace echelon::report::sample
