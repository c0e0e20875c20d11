#include "echelon/simulator/simulated_timeline.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "echelon/simulator/traffic_axes.h"

namespace echelon::simulator {
namespace {

const char* name_of_collective(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::all_reduce:
      return "all_reduce";
    case CollectiveKind::all_gather:
      return "all_gather";
    case CollectiveKind::reduce_scatter:
      return "reduce_scatter";
    case CollectiveKind::all_to_all:
      return "all_to_all";
    case CollectiveKind::broadcast:
      return "broadcast";
    case CollectiveKind::send:
      return "send";
  }
  return "";
}

SpanKind kind_of(const Action& action) {
  return action.kind == ActionKind::forward ? SpanKind::forward
                                            : SpanKind::backward;
}

}  // namespace

SpanCollector::SpanCollector(
    const ModelJob& job, const Layout& layout, std::vector<int64_t> ranks)
    : job_(job),
      layout_(layout),
      ranks_(std::move(ranks)),
      ranks_of_class_(job.job.classes.classes.size()) {
  for (const int64_t rank : ranks_) {
    const int32_t own = job.job.classes.class_of[static_cast<size_t>(rank)];
    ranks_of_class_[static_cast<size_t>(own)].push_back(rank);
  }
}

void SpanCollector::begin_step(int64_t step, double seconds) {
  step_ = step;
  begin_ = seconds;
}

bool SpanCollector::wants(int32_t rank_class) const {
  return !ranks_of_class_[static_cast<size_t>(rank_class)].empty();
}

void SpanCollector::add(
    int32_t rank_class, Span span, double begin, double end) {
  span.begin_ns = std::llround((begin_ + begin) * 1e9);
  span.end_ns = std::llround((begin_ + end) * 1e9);
  span.step = step_;
  for (const int64_t rank : ranks_of_class_[static_cast<size_t>(rank_class)]) {
    span.rank = static_cast<int32_t>(rank);
    spans_.push_back(span);
  }
}

void SpanCollector::action(
    int32_t rank_class, const Action& action, double begin, double end) {
  const bool pipeline = job_.job.schedule.num_ranks() > 1;
  const char* plain =
      action.kind == ActionKind::forward ? "forward" : "backward";
  add(rank_class,
      {.track = "compute",
       .name = pipeline ? to_string(action) : plain,
       .kind = kind_of(action)},
      begin, end);
}

void SpanCollector::optimizer(int32_t rank_class, double begin, double end) {
  add(rank_class,
      {.track = "compute", .name = "optimizer", .kind = SpanKind::optimizer},
      begin, end);
}

std::string SpanCollector::name_of(
    int32_t rank_class, const Instruction& instruction) const {
  const Program& program =
      *job_.job.ranks[static_cast<size_t>(rank_class)].program;
  std::string name = name_of_collective(instruction.collective);
  if (instruction.label >= 0) {
    name += " " + program.labels[static_cast<size_t>(instruction.label)];
  }
  return name;
}

void SpanCollector::collective(
    int32_t rank_class, const Instruction& instruction, double begin,
    double end, bool stood_still) {
  const AxisMask axes =
      job_.job.classes.axes[static_cast<size_t>(instruction.group)];
  double bytes = instruction.bytes;  // of this rank's input
  if (instruction.collective == CollectiveKind::all_gather) {
    bytes /= static_cast<double>(job_.grid.group_size(axes));
  }
  const std::string name = name_of(rank_class, instruction);
  add(rank_class,
      {.track = "comm",
       .name = name,
       .kind = SpanKind::communication,
       .bytes = std::llround(bytes),
       .axis = std::string(to_string(reported_axis(axes, layout_)))},
      begin, end);
  if (!stood_still) return;
  add(rank_class,
      {.track = "compute",
       .name = "wait for " + name,
       .kind = SpanKind::communication},
      begin, end);
}

void SpanCollector::wait_for(
    int32_t rank_class, const Instruction& launched, double begin, double end) {
  add(rank_class,
      {.track = "compute",
       .name = "wait for " + name_of(rank_class, launched),
       .kind = SpanKind::communication},
      begin, end);
}

void SpanCollector::message(
    int32_t from, int32_t to, const Action& producer, double bytes,
    double begin, double end) {
  const auto side = [&](int32_t rank_class, const char* operation) {
    add(rank_class,
        {.track = "comm",
         .name = operation + to_string(producer),
         .kind = SpanKind::communication,
         .bytes = std::llround(bytes),
         .axis = "pp"},
        begin, end);
  };
  side(from, "send ");
  side(to, "recv ");
}

void SpanCollector::wait_for_message(
    int32_t rank_class, const Action& producer, double begin, double end) {
  add(rank_class,
      {.track = "compute",
       .name = "wait " + to_string(producer),
       .kind = SpanKind::communication},
      begin, end);
}

Timeline SpanCollector::take(const std::string& title, const Cluster& cluster) {
  Timeline timeline{.title = title, .simulated = true};
  for (const int64_t rank : ranks_) {  // ascending
    timeline.rank_names.resize(static_cast<size_t>(rank) + 1);
    timeline.rank_names.back() = "rank " + std::to_string(rank) + " (" +
                                 cluster.node_of(rank).device.name + ")";
  }
  std::stable_sort(
      spans_.begin(), spans_.end(),
      [](const Span& a, const Span& b) { return a.begin_ns < b.begin_ns; });
  timeline.spans = std::move(spans_);
  return timeline;
}

std::vector<int64_t> ranks_to_show(const ModelJob& job, int64_t most) {
  std::set<int64_t> ranks;
  const auto add = [&](int64_t rank) {
    if (static_cast<int64_t>(ranks.size()) < most) ranks.insert(rank);
  };
  const RankGrid& grid = job.grid;
  for (int64_t at = 0; at < grid.degree(Axis::pp); ++at) {
    add(grid.moved(0, Axis::pp, at));
  }
  for (const int64_t rank : job.stragglers) add(rank);
  for (int64_t rank = 0; rank < grid.size() && rank < most; ++rank) add(rank);
  return {ranks.begin(), ranks.end()};
}

}  // namespace echelon::simulator
