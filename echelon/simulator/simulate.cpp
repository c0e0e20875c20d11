// The formulas give the estimate of a step; the events then replace its times.
// Steps differ only with jitter, so without it one is run for all, and repeated
// only where the timeline records it. The step of median length is the result:
// its parts are those of the slowest rank, and rates follow from its length,
// since the work of a step stays the same. Spans get the names, tracks and
// kinds of a real run's, so that the report and `echelon explain` read both.
#include "echelon/simulator/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>

#include "echelon/error.h"
#include "echelon/simulator/simulated_job.h"
#include "echelon/text/format.h"

namespace echelon::simulator {
namespace simulator {
namespace {

void check(const SimulationOptions& options) {
  const auto refuse = [](const std::string& what) { throw ConfigError(what); };
  if (options.steps < 1) {
    refuse(format("steps = {}: at least 1", options.steps));
  }
  if (!(options.jitter >= 0 && options.jitter < 1)) {
    refuse(format(
        "jitter = {:g}: a share of an operation's time, from 0 to below 1; "
        "0.05 is 5 %",
        options.jitter));
  }
  if (options.stragglers < 0) {
    refuse(format("stragglers = {}: at least 0", options.stragglers));
  }
  if (!(options.straggler_factor > 0 &&
        std::isfinite(options.straggler_factor))) {
    refuse(format(
        "straggler factor = {:g}: above 0; 1.2 takes a fifth longer",
        options.straggler_factor));
  }
}

// The axis under which time spent on such a group is reported.
Axis reported_axis(AxisMask axes, const Layout& layout) {
  for (const Axis axis :
       {Axis::dp_shard, Axis::dp_replicate, Axis::cp, Axis::ep, Axis::tp,
        Axis::pp}) {
    if ((axes & mask_of(axis)) && layout.degree(axis) > 1) return axis;
  }
  return Axis::tp;
}

// Records the spans of some ranks as a timeline like a real run's: the same
// tracks, names and kinds. A class with several of these ranks is recorded
// once, for each of them.
class SpanCollector final : public StepObserver {
 public:
  SpanCollector(
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

  // Later spans belong to `step`, which begins `seconds` after the first step.
  void begin_step(int64_t step, double seconds) {
    step_ = step;
    begin_ = seconds;
  }

  bool wants(int32_t rank_class) const override {
    return !ranks_of_class_[static_cast<size_t>(rank_class)].empty();
  }

  void action(
      int32_t rank_class, const Action& action, double begin,
      double end) override {
    const bool forward = action.kind == ActionKind::forward;
    const bool pipeline = job_.job.schedule.num_ranks() > 1;
    const char* plain = forward ? "forward" : "backward";
    add(rank_class,
        {.track = "compute",
         .name = pipeline ? to_string(action) : plain,
         .kind = forward ? timeline::SpanKind::forward
                         : timeline::SpanKind::backward},
        begin, end);
  }

  void optimizer(int32_t rank_class, double begin, double end) override {
    add(rank_class,
        {.track = "compute",
         .name = "optimizer",
         .kind = timeline::SpanKind::optimizer},
        begin, end);
  }

  void collective(
      int32_t rank_class, const Instruction& instruction, double begin,
      double end, bool blocking) override {
    const AxisMask axes =
        job_.job.classes.axes[static_cast<size_t>(instruction.group)];
    // A run records what a rank gives to a collective, and an instruction has
    // the whole tensor.
    double bytes = instruction.bytes;  // of this rank's input
    if (instruction.collective == cost::CollectiveKind::all_gather) {
      int64_t ranks = 1;
      for (const Axis axis : axes_of(axes)) ranks *= layout_.degree(axis);
      bytes /= static_cast<double>(ranks);
    }
    add(rank_class,
        {.track = "comm",
         .name = name_of(rank_class, instruction),
         .kind = timeline::SpanKind::communication,
         .bytes = std::llround(bytes),
         .axis = std::string(to_string(reported_axis(axes, layout_)))},
        begin, end);
    if (blocking) wait_for(rank_class, instruction, begin, end);
  }

  void wait_for(
      int32_t rank_class, const Instruction& launched, double begin,
      double end) override {
    add_wait(
        rank_class, "wait for " + name_of(rank_class, launched), begin, end);
  }

  void message(
      int32_t from, int32_t to, const Action& producer, double bytes,
      double begin, double end) override {
    for (const auto& [rank_class, operation] :
         {std::pair(from, "send "), std::pair(to, "recv ")}) {
      add(rank_class,
          {.track = "comm",
           .name = operation + to_string(producer),
           .kind = timeline::SpanKind::communication,
           .bytes = std::llround(bytes),
           .axis = "pp"},
          begin, end);
    }
  }

  void wait_for_message(
      int32_t rank_class, const Action& producer, double begin,
      double end) override {
    add_wait(rank_class, "wait " + to_string(producer), begin, end);
  }

  // All spans; ranks are numbered as in the job and named by their devices.
  timeline::Timeline
  take(const std::string& title, const cluster::Cluster& cluster) {
    timeline::Timeline timeline{.title = title, .simulated = true};
    for (const int64_t rank : ranks_) {  // ascending
      timeline.rank_names.resize(static_cast<size_t>(rank) + 1);
      timeline.rank_names.back() =
          format("rank {} ({})", rank, cluster.node_of(rank).device.name);
    }
    std::ranges::stable_sort(spans_, {}, &timeline::Span::begin_ns);
    timeline.spans = std::move(spans_);
    return timeline;
  }

 private:
  void add(int32_t rank_class, timeline::Span span, double begin, double end) {
    span.begin_ns = std::llround((begin_ + begin) * 1e9);
    span.end_ns = std::llround((begin_ + end) * 1e9);
    span.step = step_;
    for (const int64_t rank :
         ranks_of_class_[static_cast<size_t>(rank_class)]) {
      span.rank = static_cast<int32_t>(rank);
      spans_.push_back(span);
    }
  }

  void add_wait(
      int32_t rank_class, const std::string& name, double begin, double end) {
    add(rank_class,
        {.track = "compute",
         .name = name,
         .kind = timeline::SpanKind::communication},
        begin, end);
  }

  std::string
  name_of(int32_t rank_class, const Instruction& instruction) const {
    const Program& program =
        *job_.job.ranks[static_cast<size_t>(rank_class)].program;
    std::string name(cost::to_string(instruction.collective));
    if (instruction.label >= 0) {
      name += " " + program.labels[static_cast<size_t>(instruction.label)];
    }
    return name;
  }

  const ModelJob& job_;
  Layout layout_;
  std::vector<int64_t> ranks_;
  std::vector<std::vector<int64_t>> ranks_of_class_;
  int64_t step_ = 0;
  double begin_ = 0;
  std::vector<timeline::Span> spans_;
};

// The most telling ranks, ascending: the first pipeline, those of stragglers,
// then the first of the others. A part of a pipeline would show its ranks wait
// for nothing, so that a pipeline is taken as a whole: at most `most` ranks, or
// one pipeline.
std::vector<int64_t> ranks_to_show(const ModelJob& job, int64_t most) {
  std::set<int64_t> ranks;
  if (most == 0) return {};
  const Mesh& mesh = job.mesh;
  const int64_t stages = mesh.layout().pp;
  const auto has_room = [&] {
    return ranks.empty() || static_cast<int64_t>(ranks.size()) + stages <= most;
  };
  const auto add_pipeline_of = [&](int64_t rank) {
    if (ranks.contains(rank) || !has_room()) return;
    for (int64_t at = 0; at < stages; ++at) {
      ranks.insert(mesh.moved(rank, Axis::pp, at));
    }
  };
  add_pipeline_of(0);
  for (const int64_t rank : job.stragglers) add_pipeline_of(rank);
  for (int64_t rank = 0; rank < mesh.size() && has_room(); ++rank) {
    add_pipeline_of(rank);
  }
  return {ranks.begin(), ranks.end()};
}

size_t slowest(const SimulatedJob& job, const StepRun& run) {
  size_t last = 0;
  for (size_t c = 0; c < run.ranks.size(); ++c) {
    if (length_of(job, run.ranks[c]) > length_of(job, run.ranks[last]))
      last = c;
  }
  return last;
}

// Fills in how the slowest rank spent the step.
void fill_parts(
    const ModelJob& job, const Layout& layout, const StepRun& run,
    cost::StepEstimate& step) {
  const RankStep& rank = run.ranks[slowest(job.job, run)];
  const auto work = [&](Work kind) {
    return rank.work[static_cast<size_t>(kind)];
  };
  cost::StepParts parts;
  parts.matrix = work(Work::matrix);
  parts.memory = work(Work::memory);
  parts.recompute = work(Work::recompute);
  parts.optimizer = work(Work::optimizer);
  parts.other = work(Work::other);
  // Until its first action it was in the previous step.
  parts.bubble =
      rank.pipeline - (job.job.validates_afterwards ? rank.begin : 0);
  step.communication = {};
  const auto& axes = job.job.classes.axes;
  for (size_t i = 0; i < axes.size(); ++i) {
    const auto axis = static_cast<size_t>(reported_axis(axes[i], layout));
    parts.exposed[axis] += rank.exposed[i];
    step.communication[axis] += rank.communication[i];
  }
  const auto pipeline = static_cast<size_t>(Axis::pp);
  parts.exposed[pipeline] += rank.sending;
  step.communication[pipeline] += rank.communication.back();
  step.parts = parts;
}

void scale_rates(cost::StepEstimate& step, double seconds) {
  // Rates are work over time, and only the time is another.
  const double factor = step.step_seconds / seconds;
  step.step_seconds = seconds;
  step.tokens_per_second *= factor;
  step.model_flops_utilisation *= factor;
  step.full_attention_utilisation *= factor;
}

// The number of the step of median length.
size_t typical(const std::vector<double>& seconds) {
  std::vector<size_t> order(seconds.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto middle = order.begin() + static_cast<ptrdiff_t>(order.size() / 2);
  std::nth_element(order.begin(), middle, order.end(), [&](size_t a, size_t b) {
    return seconds[a] < seconds[b];
  });
  return *middle;
}

}  // namespace
}  // namespace simulator

SimulatedRun simulate(
    const cost::ModelShape& model, const cost::Strategy& strategy,
    const cluster::Cluster& cluster, const SimulationOptions& options) {
  using namespace simulator;
  check(options);
  SimulatedRun result;
  result.step = cost::estimate_step(model, strategy, cluster);
  const ModelJob job = make_job(model, strategy, cluster, options);
  result.simulated_ranks = static_cast<int64_t>(job.job.ranks.size());
  SpanCollector spans(
      job, strategy.layout, ranks_to_show(job, options.timeline_ranks));
  std::vector<cost::StepEstimate> steps;  // with the parts of each
  StepRun run;
  double begin = 0;
  for (int64_t step = 0; step < options.steps; ++step) {
    // When all steps are equal, later ones run only to be recorded.
    const bool seen =
        options.timeline_ranks > 0 && step < options.timeline_steps;
    if (step == 0 || options.jitter > 0 || seen) {
      spans.begin_step(step, begin);
      run = run_step(job.job, step, seen ? &spans : nullptr);
      result.events += run.events;
    }
    steps.push_back(result.step);
    fill_parts(job, strategy.layout, run, steps.back());
    result.step_seconds.push_back(run.seconds);
    begin += run.seconds;
  }
  const size_t middle = typical(result.step_seconds);
  result.step = std::move(steps[middle]);
  scale_rates(result.step, result.step_seconds[middle]);
  if (options.timeline_ranks > 0) {
    result.timeline =
        spans.take(model.name + " on " + cluster.name + ", simulated", cluster);
    result.timeline.rank_classes = job.job.classes.class_of;
  }
  return result;
}

}  // namespace echelon::simulator
