#include "tests/report/sample_pipeline.h"

#include <algorithm>
#include <random>

namespace echelon::sample {
namespace {

constexpr double kForwardNs = 2e6;

using Row = std::vector<PipelineBlock>;

PipelineBlock
block(BlockKind kind, int32_t row, int32_t stage, int32_t microbatch) {
  PipelineBlock b;
  b.kind = kind;
  b.row = row;
  b.stage = stage;
  b.microbatch = microbatch;
  return b;
}

Row gpipe(int32_t row, int32_t count) {
  Row blocks;
  for (const auto kind : {BlockKind::forward, BlockKind::backward}) {
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
    blocks.push_back(block(BlockKind::forward, row, row, forwards));
  }
  for (int32_t m = 0; m < count; ++m) {
    blocks.push_back(block(
        split ? BlockKind::backward_input : BlockKind::backward, row, row, m));
    if (split && m >= row) {
      blocks.push_back(block(BlockKind::backward_weight, row, row, weights++));
    }
    if (forwards < count) {
      blocks.push_back(block(BlockKind::forward, row, row, forwards++));
    }
  }
  while (split && weights < count) {
    blocks.push_back(block(BlockKind::backward_weight, row, row, weights++));
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
              forward ? BlockKind::forward : BlockKind::backward, row,
              row + chunk * ranks, m));
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

std::string name_of(const PipelineBlock& b) {
  return std::to_string(b.stage) + letter(b.kind) +
         std::to_string(b.microbatch);
}

void add_step(
    const PipelineShape& shape, Timeline& timeline, std::mt19937_64& random,
    int64_t step, int64_t origin, int32_t replica) {
  std::uniform_real_distribution<double> jitter(0.92, 1.1);
  const double slower = step == 1 ? 3 : 1;
  const auto blocks =
      replayed(pipeline_order(shape), [&](const PipelineBlock& b) {
        const double work = b.kind == BlockKind::backward ? 1.9 : 1.0;
        const double stage = b.row == 1 ? 1 + shape.slow_stage : 1;
        return slower * work * stage * jitter(random) + shape.latency;
      });
  for (const auto& b : *blocks) {
    Span span;
    span.rank = b.row * shape.replicas + replica;
    span.track = "compute";
    span.name = name_of(b);
    span.kind =
        b.kind == BlockKind::forward ? SpanKind::forward : SpanKind::backward;
    span.step = step;
    span.begin_ns = origin + static_cast<int64_t>(kForwardNs * b.begin);
    span.end_ns =
        origin + static_cast<int64_t>(kForwardNs * (b.end - shape.latency));
    timeline.spans.push_back(span);
    if (!shape.transfers || b.kind == BlockKind::backward_weight) continue;
    span.track = "comm";
    span.name = "send " + span.name;
    span.kind = SpanKind::communication;
    span.begin_ns = span.end_ns;
    span.end_ns = origin + static_cast<int64_t>(kForwardNs * b.end);
    span.bytes = 1 << 20;
    timeline.spans.push_back(span);
  }
}

}  // namespace

PipelineRows pipeline_order(const PipelineShape& shape) {
  PipelineRows result;
  for (int32_t row = 0; row < shape.ranks; ++row) {
    result.rows.push_back({"rank " + std::to_string(row), 0});
    double place = 0;
    for (auto& b : order_of(shape, row)) {
      b.begin = place;
      b.end = ++place;
      result.blocks.push_back(b);
    }
  }
  return result;
}

Timeline pipeline_run(const PipelineShape& shape) {
  Timeline timeline;
  timeline.title = "a pipeline";
  for (int32_t rank = 0; rank < shape.ranks * shape.replicas; ++rank) {
    timeline.rank_names.push_back("rank " + std::to_string(rank) + " (cpu)");
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

Timeline placement_run(int32_t devices, int64_t steps) {
  Timeline timeline;
  timeline.title = "a model on several devices";
  timeline.rank_names = {"rank 0 (cpu)"};
  int64_t now = 0;
  const auto add = [&](int32_t device, bool forward, int64_t step, double ms) {
    Span span;
    span.track = "device " + std::to_string(device);
    span.name = forward ? "forward" : "backward";
    span.kind = forward ? SpanKind::forward : SpanKind::backward;
    span.step = step;
    span.begin_ns = now;
    span.end_ns = now + static_cast<int64_t>(1e6 * ms);
    now = span.end_ns + 200'000;
    timeline.spans.push_back(span);
  };
  for (int64_t step = 1; step <= steps; ++step) {
    for (int32_t d = 0; d < devices; ++d) add(d, true, step, 2 + 0.4 * d);
    for (int32_t d = devices; d-- > 0;) add(d, false, step, 4 + 0.6 * d);
  }
  return timeline;
}

}  // namespace echelon::sample
