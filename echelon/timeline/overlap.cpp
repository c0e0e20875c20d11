// A moment of a track belongs to the innermost span there. Sets of intervals
// then give two decompositions of a step: the parts of StepBreakdown by
// differences of sets, and TimedParts, which StepSplit takes one after the
// other from the time that is left. In both each moment is counted once, so
// that the parts add up to the step.
#include "echelon/timeline/overlap.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon::timeline {
namespace {

bool computes(SpanKind kind) {
  return kind == SpanKind::forward || kind == SpanKind::backward ||
         kind == SpanKind::optimizer;
}

using Spans = std::vector<const Span*>;

bool follows_a_step(const Span& span) {
  return span.kind == SpanKind::evaluation || span.kind == SpanKind::other;
}

// The spans that belong to the step: an evaluation or a checkpoint that begins
// after the last computation ends it, and neither that nor what begins later
// (its collectives too) is part of it.
Spans spans_of_step(const Spans& all) {
  int64_t computed = std::numeric_limits<int64_t>::min();
  for (const Span* span : all) {
    if (computes(span->kind)) computed = std::max(computed, span->end_ns);
  }
  int64_t end = std::numeric_limits<int64_t>::max();
  for (const Span* span : all) {
    if (!follows_a_step(*span) || span->begin_ns < computed) continue;
    end = std::min(end, span->begin_ns);
  }
  Spans spans;
  for (const Span* span : all) {
    if (span->kind == SpanKind::evaluation) continue;
    if (span->begin_ns < end) spans.push_back(span);
  }
  return spans;
}

StepActivity activity_of(Spans spans) {
  StepActivity result;
  result.rank = spans.front()->rank;
  result.step = spans.front()->step;
  result.window = {spans.front()->begin_ns, spans.front()->end_ns};
  std::map<std::string, Spans> tracks;
  std::vector<Interval> communication;
  for (const Span* span : spans) {
    result.window.begin = std::min(result.window.begin, span->begin_ns);
    result.window.end = std::max(result.window.end, span->end_ns);
    tracks[span->track].push_back(span);
    if (span->kind == SpanKind::communication) {
      communication.push_back({span->begin_ns, span->end_ns});
    }
  }
  std::vector<Interval> compute;
  for (auto& [name, track] : tracks) {
    for (const auto& piece : owned_pieces(std::move(track))) {
      if (computes(piece.span->kind)) compute.push_back(piece.time);
      result.pieces.push_back(piece);
    }
  }
  result.compute = merged(std::move(compute));
  result.communication = merged(std::move(communication));
  result.overlapped = intersection(result.communication, result.compute);
  result.exposed = difference(result.communication, result.compute);
  result.data = difference(
      difference(times_of_kind(result, SpanKind::data), result.compute),
      result.communication);
  result.spans = std::move(spans);
  return result;
}

StepBreakdown breakdown_of(const StepActivity& activity) {
  StepBreakdown b;
  b.rank = activity.rank;
  b.step = activity.step;
  b.step_seconds = total_seconds({activity.window});
  b.compute_seconds = total_seconds(activity.compute);
  b.communication_seconds = total_seconds(activity.communication);
  b.overlapped_seconds = total_seconds(activity.overlapped);
  b.exposed_seconds = total_seconds(activity.exposed);
  b.data_seconds = total_seconds(activity.data);
  b.idle_seconds = std::max(
      0.0,
      b.step_seconds - b.compute_seconds - b.exposed_seconds - b.data_seconds);
  return b;
}

StepBreakdown mean_of(const std::vector<StepBreakdown>& all, int32_t rank) {
  StepBreakdown mean;
  mean.rank = rank;
  if (all.empty()) return mean;
  constexpr double StepBreakdown::*kFields[] = {
      &StepBreakdown::step_seconds,          &StepBreakdown::compute_seconds,
      &StepBreakdown::communication_seconds, &StepBreakdown::overlapped_seconds,
      &StepBreakdown::exposed_seconds,       &StepBreakdown::data_seconds,
      &StepBreakdown::idle_seconds};
  for (auto field : kFields) {
    for (const auto& b : all) mean.*field += b.*field;
    mean.*field /= static_cast<double>(all.size());
  }
  return mean;
}

// The steps whose slowest rank takes more than three times the median.
std::set<int64_t> outlier_steps(const std::vector<StepBreakdown>& steps) {
  std::map<int64_t, double> longest;
  for (const auto& b : steps) {
    longest[b.step] = std::max(longest[b.step], b.step_seconds);
  }
  std::vector<double> sorted;
  for (const auto& [step, seconds] : longest) sorted.push_back(seconds);
  std::sort(sorted.begin(), sorted.end());
  std::set<int64_t> outliers;
  for (const auto& [step, seconds] : longest) {
    if (seconds > 3 * sorted[sorted.size() / 2]) outliers.insert(step);
  }
  return outliers;
}

void find_slowest(Diagnosis& diagnosis) {
  if (diagnosis.ranks.size() < 2) return;
  const auto work = [](const StepBreakdown& b) {
    return b.compute_seconds + b.data_seconds;
  };
  const auto slowest = std::ranges::max_element(diagnosis.ranks, {}, work);
  diagnosis.slowest_rank = slowest->rank;
  const double mean = work(diagnosis.mean);
  diagnosis.slowest_excess = mean > 0 ? work(*slowest) / mean - 1 : 0;
}

std::string percent(double part, double whole) {
  return format_percent(whole > 0 ? part / whole : 0);
}

// Seconds of collectives along the axis, summed over all ranks.
double seconds_along(const Timeline& timeline, const std::string& axis) {
  double sum = 0;
  for (const auto& span : timeline.spans) {
    if (span.kind != SpanKind::communication || span.axis != axis) continue;
    sum += static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
  }
  return sum;
}

std::string sentence_for(const Diagnosis& d, bool waits_for_stages) {
  const StepBreakdown& m = d.mean;
  const double step = m.step_seconds;
  if (step <= 0) return "";
  std::string text;
  const double lost =
      std::max({m.exposed_seconds, m.data_seconds, m.idle_seconds});
  if (lost < 0.05 * step) {
    text = format(
        "Computation fills {} of the step", percent(m.compute_seconds, step));
    if (m.communication_seconds > 0) {
      text += format(
          "; {} is exposed communication", percent(m.exposed_seconds, step));
    }
  } else if (lost == m.exposed_seconds && waits_for_stages) {
    text = format(
        "{} of the step is waiting for other stages of the pipeline: its "
        "bubble, and transfers",
        percent(m.exposed_seconds, step));
  } else if (lost == m.exposed_seconds) {
    text = format(
        "{} of the step is exposed communication; {} of all communication "
        "hides behind computation",
        percent(m.exposed_seconds, step),
        percent(m.overlapped_seconds, m.communication_seconds));
  } else if (lost == m.data_seconds) {
    text = format(
        "{} of the step is waiting for data; more loader threads or less work "
        "per sample would shorten it",
        percent(m.data_seconds, step));
  } else {
    text = format(
        "{} of the step is neither computation, communication nor waiting for "
        "data",
        percent(m.idle_seconds, step));
  }
  if (d.slowest_rank >= 0 && d.slowest_excess > 0.05) {
    text += format(
        "; rank {} works {} longer than the average rank, and the others wait "
        "for it",
        d.slowest_rank, percent(d.slowest_excess, 1));
  }
  return text + ".";
}

}  // namespace

// A sweep over the begins and ends of the track's spans. They are numbered by
// begin, longer ones first, so that of the open spans the one with the largest
// number is the innermost and owns the time up to the next edge.
std::vector<Piece> owned_pieces(std::vector<const Span*> track) {
  std::ranges::stable_sort(track, {}, [](const Span* span) {
    return std::pair(span->begin_ns, -span->end_ns);
  });
  std::vector<std::pair<int64_t, size_t>> edges;
  for (size_t i = 0; i < track.size(); ++i) {
    if (track[i]->begin_ns >= track[i]->end_ns) continue;
    edges.emplace_back(track[i]->begin_ns, i);
    edges.emplace_back(track[i]->end_ns, i);
  }
  std::sort(edges.begin(), edges.end());
  std::vector<Piece> pieces;
  std::set<size_t> open;
  int64_t since = 0;
  for (const auto& [time, index] : edges) {
    if (!open.empty() && since < time) {
      const Span* owner = track[*open.rbegin()];
      if (!pieces.empty() && pieces.back().span == owner &&
          pieces.back().time.end == since) {
        pieces.back().time.end = time;
      } else {
        pieces.push_back({owner, {since, time}});
      }
    }
    since = time;
    if (open.erase(index) == 0) open.insert(index);
  }
  return pieces;
}

Intervals times_of_kind(const StepActivity& step, SpanKind kind) {
  std::vector<Interval> times;
  for (const Piece& piece : step.pieces) {
    if (piece.span->kind == kind) times.push_back(piece.time);
  }
  return merged(std::move(times));
}

std::vector<StepActivity> step_activities(const Timeline& timeline) {
  std::map<std::pair<int64_t, int32_t>, Spans> groups;
  for (const auto& span : timeline.spans) {
    if (span.step < 0) continue;
    groups[{span.step, span.rank}].push_back(&span);
  }
  std::vector<StepActivity> result;
  for (const auto& [key, all] : groups) {
    Spans spans = spans_of_step(all);
    if (!spans.empty()) result.push_back(activity_of(std::move(spans)));
  }
  return result;
}

std::map<int64_t, Interval>
step_windows(const std::vector<StepActivity>& activities) {
  std::map<int64_t, Interval> windows;
  for (const StepActivity& activity : activities) {
    const auto [at, is_new] =
        windows.try_emplace(activity.step, activity.window);
    at->second.begin = std::min(at->second.begin, activity.window.begin);
    at->second.end = std::max(at->second.end, activity.window.end);
  }
  return windows;
}

Diagnosis diagnose(const Timeline& timeline) {
  Diagnosis diagnosis;
  for (const auto& activity : step_activities(timeline)) {
    diagnosis.steps.push_back(breakdown_of(activity));
  }
  std::set<int64_t> steps;
  for (const auto& b : diagnosis.steps) steps.insert(b.step);
  diagnosis.outliers = outlier_steps(diagnosis.steps);
  diagnosis.num_steps = static_cast<int64_t>(steps.size());
  diagnosis.num_outliers = static_cast<int64_t>(diagnosis.outliers.size());
  std::map<int32_t, std::vector<StepBreakdown>> by_rank;
  for (const auto& b : diagnosis.steps) {
    if (!diagnosis.outliers.contains(b.step)) by_rank[b.rank].push_back(b);
  }
  for (const auto& [rank, all] : by_rank) {
    diagnosis.ranks.push_back(mean_of(all, rank));
  }
  diagnosis.mean = mean_of(diagnosis.ranks, -1);
  find_slowest(diagnosis);
  // In a pipeline with tp the exposed time is that of both axes: the one that
  // communicates more gives the sentence.
  const bool waits_for_stages =
      typical_pipeline_step(timeline).has_value() &&
      seconds_along(timeline, "tp") <= seconds_along(timeline, "pp");
  diagnosis.sentence = sentence_for(diagnosis, waits_for_stages);
  return diagnosis;
}

// --- The parts of a typical step -------------------------------------------

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
    // Computing comes first: what it hides costs the step nothing.
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
    constexpr std::array kOrder = {"tp",       "cp",    "ep",
                                   "dp_shard", "shard", "dp_replicate"};
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
  if (axis == "shard") return "fsdp with ep, not hidden";
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

}  // namespace echelon::timeline
