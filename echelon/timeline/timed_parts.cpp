#include "echelon/timeline/timed_parts.h"

#include <algorithm>
#include <array>
#include <utility>

#include "echelon/timeline/pipeline_blocks.h"

namespace echelon {
namespace {

constexpr double kNothing = 0.5e-9;  // seconds

// "wait 0F3" waits for the result of a stage.
bool waits_for_stage(const Span& span) {
  return span.name.rfind("wait ", 0) == 0 &&
         block_of_name(span.name.substr(5)).has_value();
}

// Takes the parts of one step of one rank, each from the time that is left.
class StepSplit {
 public:
  StepSplit(const StepActivity& step, Interval window, bool pipeline)
      : step_(step), window_(window), pipeline_(pipeline), left_{window} {}

  void add_to(TimedParts& sum) {
    sum.forward += take(times_of_kind(step_, SpanKind::forward));
    sum.backward += take(times_of_kind(step_, SpanKind::backward));
    sum.optimizer += take(times_of_kind(step_, SpanKind::optimizer));
    take_waits(sum);
    take_exposed(sum);
    sum.data += take(step_.data);
    if (pipeline_) {  // ranks that begin later or end earlier wait for other
                      // stages
      sum.stages += take({{window_.begin, step_.window.begin}});
      sum.stages += take({{step_.window.end, window_.end}});
    }
    sum.other += total_seconds(left_);
  }

 private:
  double take(std::vector<Interval> times) {
    return take_seconds(left_, std::move(times));
  }

  double& part(TimedParts& sum, const std::string& axis) {
    // The figures of a step wait until the last stage has its own.
    if (axis == "pp" || (pipeline_ && axis == "world")) return sum.stages;
    return sum.exposed[axis];
  }

  // A span in which a rank waits says for which call.
  void take_waits(TimedParts& sum) {
    std::map<std::string, std::string> axes;  // by the name of the wait
    for (const auto& piece : step_.pieces) {
      if (!piece.span->axis.empty()) {
        axes["wait for " + piece.span->name] = piece.span->axis;
      }
    }
    std::map<std::string, std::vector<Interval>> waits;  // by axis
    for (const auto& piece : step_.pieces) {
      const Span& span = *piece.span;
      if (span.kind != SpanKind::communication) continue;
      if (waits_for_stage(span)) {
        waits["pp"].push_back(piece.time);
      } else if (const auto axis = axes.find(span.name); axis != axes.end()) {
        waits[axis->second].push_back(piece.time);
      }
    }
    for (auto& [axis, times] : waits) {
      part(sum, axis) += take(std::move(times));
    }
  }

  // Other communication while nothing computes, from the innermost axis to the
  // outermost.
  void take_exposed(TimedParts& sum) {
    constexpr std::array kOrder = {
        "tp", "cp", "ep", "dp_shard", "dp_replicate"};
    std::map<std::string, std::vector<Interval>> calls;
    for (const auto& piece : step_.pieces) {
      if (piece.span->kind != SpanKind::communication) continue;
      if (!piece.span->axis.empty()) {
        calls[piece.span->axis].push_back(piece.time);
      }
    }
    for (const char* axis : kOrder) {
      if (const auto found = calls.find(axis); found != calls.end()) {
        part(sum, axis) += take(std::move(found->second));
        calls.erase(found);
      }
    }
    for (auto& [axis, times] : calls) {
      part(sum, axis) += take(std::move(times));
    }
    if (const double rest = take(step_.exposed); rest > 0)
      part(sum, "") += rest;
  }

  const StepActivity& step_;
  Interval window_;
  bool pipeline_;
  Intervals left_;
};

std::string name_of_axis(const std::string& axis) {
  if (axis == "dp_replicate") return "dp, not hidden";
  if (axis == "dp_shard") return "fsdp, not hidden";
  if (axis == "world") return "figures of all ranks";
  return (axis.empty() ? "communication" : axis) + ", not hidden";
}

}  // namespace

double TimedParts::step_seconds() const {
  double sum = forward + backward + optimizer + stages + data + other;
  for (const auto& [axis, seconds] : exposed) sum += seconds;
  return sum;
}

TimedParts timed_parts(const Timeline& timeline, const Diagnosis& diagnosis) {
  auto activities = step_activities(timeline);
  std::erase_if(activities, [&](const StepActivity& activity) {
    return diagnosis.outliers.contains(activity.step);
  });
  TimedParts mean;
  if (activities.empty()) return mean;
  const auto windows = step_windows(activities);
  const bool pipeline = typical_pipeline_step(timeline).has_value();
  for (const auto& activity : activities) {
    const Interval window =
        pipeline ? windows.at(activity.step) : activity.window;
    StepSplit(activity, window, pipeline).add_to(mean);
  }
  const auto count = static_cast<double>(activities.size());
  for (double* part :
       {&mean.forward, &mean.backward, &mean.optimizer, &mean.stages,
        &mean.data, &mean.other}) {
    *part /= count;
  }
  for (auto& [axis, seconds] : mean.exposed) seconds /= count;
  return mean;
}

std::vector<ComparedPart>
compared_parts(const TimedParts& predicted, const TimedParts& measured) {
  std::vector<ComparedPart> parts = {
      {"forward", "fw", predicted.forward, measured.forward},
      {"backward", "bw", predicted.backward, measured.backward},
      {"optimizer", "op", predicted.optimizer, measured.optimizer}};
  std::map<std::string, std::pair<double, double>> axes;
  for (const auto& [axis, seconds] : predicted.exposed)
    axes[axis].first = seconds;
  for (const auto& [axis, seconds] : measured.exposed)
    axes[axis].second = seconds;
  for (const auto& [axis, seconds] : axes) {
    parts.push_back({name_of_axis(axis), "ex", seconds.first, seconds.second});
  }
  parts.push_back(
      {"waiting for other stages", "idle", predicted.stages, measured.stages});
  parts.push_back({"waiting for data", "da", predicted.data, measured.data});
  parts.push_back({"the rest", "ot", predicted.other, measured.other});
  for (ComparedPart& part : parts) {  // rounding errors of sums are not parts
    for (double* seconds : {&part.predicted, &part.measured}) {
      if (*seconds < kNothing) *seconds = 0;
    }
  }
  std::erase_if(parts, [](const ComparedPart& part) {
    return part.predicted == 0 && part.measured == 0;
  });
  return parts;
}

}  // namespace echelon
