#include "tests/explain/made_run.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"

namespace echelon::explain::made {
namespace {

int64_t ns(double milliseconds) {
  return static_cast<int64_t>(milliseconds * 1e6);
}

class Steps {
 public:
  explicit Steps(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      timeline_.rank_names.push_back("rank " + std::to_string(rank) + " (cpu)");
    }
    timeline_.title = "made";
  }

  void
  add(int rank, const std::string& track, const std::string& name,
      timeline::SpanKind kind, double begin, double end,
      const std::string& axis = "", int64_t bytes = 0) {
    timeline_.spans.push_back(
        {rank, track, name, kind, ns(begin), ns(end), step_, bytes, axis});
  }

  void begin(int64_t step) { step_ = step; }
  timeline::Timeline take() { return std::move(timeline_); }

 private:
  timeline::Timeline timeline_;
  int64_t step_ = 0;
};

// Returns when the step has ended on all ranks.
double
add_step(Steps& steps, const DataParallel& run, int64_t step, double begin) {
  steps.begin(step);
  std::vector<RankStep> times;
  std::vector<double> start, computed;
  for (int rank = 0; rank < run.ranks; ++rank) {
    times.push_back(run.times(rank, step));
    start.push_back(begin + times.back().data + times.back().forward);
    computed.push_back(start.back() + times.back().backward);
  }
  double ready = begin;  // of the links: one bucket after another
  for (int bucket = 0; run.ranks > 1 && bucket < run.buckets; ++bucket) {
    const auto leaves = [&](int rank) {
      return start[rank] + times[rank].backward * (bucket + 1) / run.buckets;
    };
    for (int rank = 0; rank < run.ranks; ++rank) {
      ready = std::max(ready, leaves(rank));
    }
    ready += run.transfer;
    for (int rank = 0; rank < run.ranks; ++rank) {
      steps.add(
          rank, "comm", "all_reduce bucket " + std::to_string(bucket),
          timeline::SpanKind::communication, leaves(rank), ready, run.axis,
          run.bytes / run.buckets);
    }
  }
  double end = begin;
  for (int rank = 0; rank < run.ranks; ++rank) {
    const double done = std::max(computed[rank], run.ranks > 1 ? ready : 0);
    steps.add(
        rank, "compute", "data wait", timeline::SpanKind::data, begin,
        begin + times[rank].data);
    steps.add(
        rank, "compute", "forward", timeline::SpanKind::forward,
        begin + times[rank].data, start[rank]);
    steps.add(
        rank, "compute", "backward", timeline::SpanKind::backward, start[rank],
        done);
    if (done > computed[rank]) {
      steps.add(
          rank, "compute", "wait for gradients",
          timeline::SpanKind::communication, computed[rank], done);
    }
    steps.add(
        rank, "compute", "optimizer", timeline::SpanKind::optimizer, done,
        done + times[rank].optimizer);
    end = std::max(end, done + times[rank].optimizer);
  }
  return end;
}

}  // namespace

timeline::Timeline timeline_of(const DataParallel& run) {
  Steps steps(run.ranks);
  double now = 0;
  for (int64_t step = 0; step < run.steps; ++step) {
    now = add_step(steps, run, step, now);
  }
  return steps.take();
}

timeline::Timeline timeline_of(
    const Schedule& schedule, const std::vector<StageCost>& costs,
    int64_t steps) {
  const Timing timing = time_schedule(schedule, costs, true);
  Steps made(static_cast<int>(schedule.ranks.size()));
  double now = 0;
  for (int64_t step = 0; step < steps; ++step) {
    made.begin(step);
    const double end = now + 1e3 * timing.makespan;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      const int place = static_cast<int>(rank);
      double before = now;
      const auto wait = [&](double until) {
        if (until <= before) return;
        made.add(
            place, "compute", "wait", timeline::SpanKind::communication, before,
            until);
      };
      for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
        const Action& action = schedule.ranks[rank][i];
        const ActionTime& time = timing.actions[rank][i];
        wait(now + 1e3 * time.begin);
        before = now + 1e3 * time.end;
        made.add(
            place, "compute", to_string(action),
            action.kind == ActionKind::forward ? timeline::SpanKind::forward
                                               : timeline::SpanKind::backward,
            now + 1e3 * time.begin, before);
      }
      wait(end);
      made.add(
          place, "compute", "optimizer", timeline::SpanKind::optimizer, end,
          end + 1);
    }
    now = end + 1;
  }
  return made.take();
}

void add_memory(
    timeline::Timeline& timeline, int64_t bytes, int64_t limit_bytes) {
  for (size_t rank = 0; rank < timeline.rank_names.size(); ++rank) {
    timeline::RankMemory memory{.rank = static_cast<int32_t>(rank)};
    memory.limit_bytes = limit_bytes;
    for (const int64_t held : {bytes / 4, bytes, bytes / 4}) {
      timeline::MemorySample sample{
          .time_ns = ns(static_cast<double>(memory.samples.size()))};
      sample.memory[timeline::MemoryKind::activations] = held;
      memory.samples.push_back(sample);
    }
    timeline.memory.push_back(std::move(memory));
  }
}

Job job_of(const std::string& layout) {
  Job job;
  job.layout = parse_layout(layout);
  job.train.steps = 10;
  return job;
}

std::string write_run(
    const std::string& folder, const Job& job,
    const timeline::Timeline& timeline) {
  namespace fs = std::filesystem;
  fs::create_directories(folder);
  std::ofstream(fs::path(folder) / "config.toml") << to_toml(job);
  if (!timeline.spans.empty()) {
    timeline::write_chrome_trace(fs::path(folder) / "timeline.json", timeline);
  }
  timeline::MetricsWriter metrics(fs::path(folder) / "metrics.jsonl");
  for (int64_t step = 1; step <= job.train.steps; ++step) {
    timeline::StepMetrics one;
    one.step = step;
    one.step_seconds = 0.1;
    one.data_seconds = 0.0005;
    metrics.append(one);
  }
  return folder;
}

}  // namespace echelon::explain::made
