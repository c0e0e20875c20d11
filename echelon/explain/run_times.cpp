// Each nanosecond of a rank's step is counted once. Computing comes first, then
// waiting for data; what communication exposes is divided in this order: the
// end of a pipeline's step, waits for ranks that came late, the axes from the
// innermost one out, and messages of the pipeline. A collective's calls on
// several ranks are one by step, axis, group, name and the number of the call;
// a rank waits in it from its own begin to that of the last rank.
#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "echelon/explain/findings.h"
#include "echelon/layout/mesh.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon::explain {
namespace {

bool is_collective(const timeline::Span& span) {
  return span.kind == timeline::SpanKind::communication && span.step >= 0 &&
         !span.axis.empty() && span.axis != "pp" && span.track != "compute";
}

// Names the group of a collective by its first rank.
class Groups {
 public:
  Groups(
      const timeline::Timeline& timeline, const std::optional<Layout>& layout) {
    std::set<std::string> axes;
    int32_t most = -1;
    for (const timeline::Span& span : timeline.spans) {
      most = std::max(most, span.rank);
      if (is_collective(span) && span.axis != "world") axes.insert(span.axis);
    }
    known_ = layout ? most < layout->num_ranks() : axes.size() < 2;
    if (known_ && layout) mesh_.emplace(*layout);
  }

  bool known() const { return known_; }

  int first_of(int32_t rank, const std::string& axis) {
    if (!mesh_ || axis == "world") return 0;
    const auto [at, is_new] = found_.try_emplace({rank, axis}, 0);
    if (is_new) at->second = ranks_along(rank, axis).front();
    return at->second;
  }

 private:
  std::vector<int> ranks_along(int32_t rank, const std::string& axis) const {
    // Parameters are sharded, and gradients summed, over cp too. With ep,
    // "shard" and "data" are the groups for all but the experts
    // (comm/mesh_groups.h).
    const auto along = [&](const std::vector<Axis>& axes) {
      return mesh_->ranks_along(rank, axes);
    };
    if (axis == to_string(Axis::dp_shard)) {
      return along({Axis::dp_shard, Axis::cp});
    }
    for (const Axis one : kAxes) {
      if (to_string(one) == axis) return mesh_->ranks_along(rank, one);
    }
    if (axis == "dp") {
      return along({Axis::dp_replicate, Axis::dp_shard, Axis::cp});
    }
    if (axis == "shard") return along({Axis::dp_shard, Axis::ep, Axis::cp});
    // "data": all ranks with other samples, or other tokens of them.
    return along({Axis::dp_replicate, Axis::dp_shard, Axis::ep, Axis::cp});
  }

  bool known_ = false;
  std::optional<Mesh> mesh_;
  std::map<std::pair<int32_t, std::string>, int> found_;
};

// step, axis, group, name, number of the call
using Key = std::tuple<int64_t, std::string, int, std::string, int>;

std::map<Key, std::vector<const timeline::Span*>>
calls_of(const timeline::Timeline& timeline, Groups& groups) {
  std::vector<const timeline::Span*> spans;
  for (const timeline::Span& span : timeline.spans) {
    if (is_collective(span)) spans.push_back(&span);
  }
  std::ranges::stable_sort(spans, {}, &timeline::Span::begin_ns);
  std::map<std::tuple<int32_t, int64_t, std::string, std::string>, int> counts;
  std::map<Key, std::vector<const timeline::Span*>> calls;
  for (const timeline::Span* span : spans) {
    const int count =
        counts[{span->rank, span->step, span->axis, span->name}]++;
    const int group = groups.first_of(span->rank, span->axis);
    calls[{span->step, span->axis, group, span->name, count}].push_back(span);
  }
  return calls;
}

// The innermost axis, which each layer waits for, is first. "world", along
// which a step's sums are shared, is left out.
constexpr const char* kAxesInside[] = {"tp", "ep", "cp", "fsdp", "dp"};

void add(RankTimes& sum, const RankTimes& one, double weight) {
  constexpr double RankTimes::*kFields[] = {
      &RankTimes::step,       &RankTimes::forward, &RankTimes::backward,
      &RankTimes::optimizer,  &RankTimes::data,    &RankTimes::for_ranks,
      &RankTimes::for_stages, &RankTimes::idle};
  for (auto field : kFields) sum.*field += weight * (one.*field);
  for (const auto& [axis, time] : one.communication) {
    sum.communication[axis] += weight * time;
  }
}

RankTimes mean_of(const std::vector<RankTimes>& all) {
  RankTimes mean;
  for (const auto& one : all) {
    add(mean, one, 1.0 / static_cast<double>(all.size()));
  }
  return mean;
}

class Sorter {
 public:
  Sorter(
      const timeline::Timeline& timeline, const std::optional<Layout>& layout)
      : late_(late_ranks(timeline, layout)),
        pipeline_(timeline::typical_pipeline_step(timeline).has_value()) {
    for (const timeline::Span& span : timeline.spans) {
      if (span.kind != timeline::SpanKind::communication || span.axis.empty())
        continue;
      calls_[{span.rank, span.step}].push_back(&span);
    }
  }

  bool pipeline() const { return pipeline_; }

  // `window`: of the step on all ranks.
  RankTimes times_of(
      const timeline::StepActivity& activity,
      const timeline::Interval& window) const {
    RankTimes times;
    times.step = timeline::total_seconds({activity.window});
    if (pipeline_) {  // the last stages begin later, the first may end earlier
      times.for_stages = timeline::total_seconds({window}) - times.step;
      times.step = timeline::total_seconds({window});
    }
    computing(activity, times);
    times.data = timeline::total_seconds(activity.data);
    communicating(activity, times);
    times.idle = std::max(
        0.0, timeline::total_seconds({activity.window}) - times.compute() -
                 times.data - timeline::total_seconds(activity.exposed));
    return times;
  }

 private:
  // Tracks that compute at the same time count once, for the first of these.
  static void
  computing(const timeline::StepActivity& activity, RankTimes& times) {
    timeline::Intervals rest = {activity.window};
    const auto part = [&](timeline::SpanKind kind) {
      return timeline::take_seconds(
          rest, timeline::times_of_kind(activity, kind));
    };
    times.forward = part(timeline::SpanKind::forward);
    times.backward = part(timeline::SpanKind::backward);
    times.optimizer = part(timeline::SpanKind::optimizer);
  }

  void communicating(
      const timeline::StepActivity& activity, RankTimes& times) const {
    const RankStep place = {activity.rank, activity.step};
    timeline::Intervals rest = activity.exposed;
    const auto take = [&](const timeline::Intervals& what) {
      return timeline::take_seconds(rest, what);
    };
    const auto late = late_.waits.find(place);
    const timeline::Intervals world = calls(place, "world");
    timeline::Intervals for_others;
    if (late != late_.waits.end()) for_others = late->second;
    // Where a pipeline's ranks synchronise at the end of a step, the first ones
    // wait for the stages that end last.
    if (pipeline_) times.for_stages += take(world);
    times.for_ranks += take(for_others);
    for (const char* axis : kAxesInside) {
      if (const double time = take(calls(place, axis)); time > 0) {
        times.communication[axis] += time;
      }
    }
    if (const double time = take(received(place)); time > 0) {
      times.communication["pp"] += time;
    }
    const double other = timeline::total_seconds(rest);
    if (pipeline_) {
      times.for_stages += other;
    } else if (other > 0) {
      times.communication[""] += other;
    }
  }

  template <class Which>
  timeline::Intervals
  calls_that(const RankStep& place, const Which& which) const {
    std::vector<timeline::Interval> list;
    if (const auto found = calls_.find(place); found != calls_.end()) {
      for (const timeline::Span* span : found->second) {
        if (which(*span)) list.push_back({span->begin_ns, span->end_ns});
      }
    }
    return timeline::merged(std::move(list));
  }

  timeline::Intervals
  calls(const RankStep& place, const std::string& axis) const {
    return calls_that(place, [&](const timeline::Span& span) {
      return axis_of_group(span.axis) == axis;
    });
  }

  // From when a message could be sent (trim_receives) until it arrived.
  timeline::Intervals received(const RankStep& place) const {
    return calls_that(place, [](const timeline::Span& span) {
      return span.axis == "pp" && span.name.starts_with("recv ");
    });
  }

  LateRanks late_;
  bool pipeline_;
  std::map<RankStep, std::vector<const timeline::Span*>> calls_;
};

std::map<int32_t, int32_t> first_stages(const timeline::Timeline& timeline) {
  std::map<int32_t, int32_t> first;
  for (const timeline::Span& span : timeline.spans) {
    if (span.kind != timeline::SpanKind::forward || span.track != "compute")
      continue;
    const auto block = timeline::block_of_name(span.name);
    if (!block) continue;
    const auto [at, is_new] = first.try_emplace(span.rank, block->stage);
    at->second = std::min(at->second, block->stage);
  }
  return first;
}

}  // namespace

std::string axis_of_group(const std::string& group) {
  if (group == "dp_shard" || group == "shard") return "fsdp";
  return group == "dp_replicate" || group == "data" ? "dp" : group;
}

RankTimes shares_of(const RankTimes& times) {
  RankTimes shares;
  if (times.step > 0) add(shares, times, 1 / times.step);
  return shares;
}

LateRanks late_ranks(
    const timeline::Timeline& timeline, const std::optional<Layout>& layout) {
  Groups groups(timeline, layout);
  if (!groups.known()) return {};
  std::map<RankStep, std::vector<timeline::Interval>> waits, caused;
  for (const auto& [key, spans] : calls_of(timeline, groups)) {
    const timeline::Span* last =
        *std::ranges::max_element(spans, {}, &timeline::Span::begin_ns);
    for (const timeline::Span* span : spans) {
      const timeline::Interval wait = {
          span->begin_ns, std::min(span->end_ns, last->begin_ns)};
      if (wait.begin >= wait.end) continue;
      waits[{span->rank, span->step}].push_back(wait);
      caused[{last->rank, span->step}].push_back(wait);
    }
  }
  LateRanks result;
  for (auto& [place, list] : waits)
    result.waits[place] = timeline::merged(std::move(list));
  for (auto& [place, list] : caused) {
    result.caused[place] = timeline::merged(std::move(list));
  }
  return result;
}

RunTimes run_times(
    const timeline::Timeline& timeline, const std::optional<Layout>& layout) {
  const Sorter sorter(timeline, layout);
  const timeline::Diagnosis diagnosis = timeline::diagnose(timeline);
  const auto stages = first_stages(timeline);
  std::map<int32_t, RankHistory> ranks;
  std::set<int64_t> steps;
  const auto activities = timeline::step_activities(timeline);
  const auto windows = timeline::step_windows(activities);
  for (const timeline::StepActivity& activity : activities) {
    if (diagnosis.outliers.contains(activity.step)) continue;
    steps.insert(activity.step);
    ranks[activity.rank].steps.push_back(
        sorter.times_of(activity, windows.at(activity.step)));
  }
  RunTimes run;
  run.pipeline = sorter.pipeline();
  run.steps.assign(steps.begin(), steps.end());
  std::vector<RankTimes> means;
  for (auto& [rank, history] : ranks) {
    history.rank = rank;
    if (const auto found = stages.find(rank); found != stages.end()) {
      history.first_stage = found->second;
    }
    history.mean = mean_of(history.steps);
    means.push_back(history.mean);
    run.ranks.push_back(std::move(history));
  }
  if (!means.empty()) run.mean = mean_of(means);
  return run;
}

}  // namespace echelon::explain
