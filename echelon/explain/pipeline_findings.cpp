// The waits of a pipeline are split by replaying the measured order of passes
// (timeline::replayed) with other durations. One replay gives each pass the
// mean of its stage and kind, another the mean over all stages. The difference
// of their lengths is due to uneven stages, and the idle part of the second is
// the schedule's bubble. The rest of the measured waits comes from passes that
// sometimes take longer.
#include <algorithm>
#include <map>
#include <span>
#include <string>

#include "echelon/explain/findings.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon::explain {
namespace {

struct Sum {
  double seconds = 0;
  double count = 0;
  void add(double value) {
    seconds += value;
    count += 1;
  }
  double mean() const { return count > 0 ? seconds / count : 0; }
};

struct Sums {
  std::map<std::pair<timeline::BlockKind, int32_t>, Sum>
      of_stage;  // kind, stage
  std::map<timeline::BlockKind, Sum> of_all;
  std::map<int32_t, std::vector<int>> ranks;  // by stage
};

int rank_of(const timeline::PipelineRow& row) {
  return std::stoi(row.name.substr(row.name.find(' ') + 1));  // "rank 3"
}

Sums sums_of(const std::vector<timeline::PipelineRows>& steps) {
  Sums sums;
  for (const timeline::PipelineRows& step : steps) {
    for (const timeline::PipelineBlock& block : step.blocks) {
      const double seconds = block.end - block.begin;
      sums.of_stage[{block.kind, block.stage}].add(seconds);
      sums.of_all[block.kind].add(seconds);
      auto& ranks = sums.ranks[block.stage];
      const int rank = rank_of(step.rows[static_cast<size_t>(block.row)]);
      if (std::ranges::find(ranks, rank) == ranks.end()) {
        ranks.push_back(rank);
      }
    }
  }
  return sums;
}

std::vector<double> by_stage(const Sums& sums) {
  std::vector<double> seconds;
  for (const auto& [place, sum] : sums.of_stage) {
    const auto stage = static_cast<size_t>(place.second);
    if (seconds.size() <= stage) seconds.resize(stage + 1, 0);
    seconds[stage] += sum.mean();
  }
  return seconds;
}

constexpr size_t kShown = 8;  // of the numbers in a list

template <class T>
std::span<const T> shown(const std::vector<T>& all) {
  return std::span(all).first(std::min(all.size(), kShown));
}

std::string seconds_of_stages(const std::vector<double>& seconds) {
  return join(shown(seconds), ", ", format_seconds) +
         (seconds.size() > kShown ? ", …" : "");
}

std::string ranks_text(const std::vector<int>& ranks) {
  const std::string text =
      (ranks.size() == 1 ? "rank " : "ranks ") + join(shown(ranks), ", ");
  if (ranks.size() <= kShown) return text;
  return format("{} and {} more", text, ranks.size() - kShown);
}

RunFinding
uneven_stages(const Evidence& evidence, const StageCosts& costs, double share) {
  RunFinding found{
      .fault = Fault::stage_imbalance,
      .share = share,
      .gain = share,
      .gain_source = GainSource::replayed,
      .ranks = costs.slowest_ranks};
  const auto slowest = std::ranges::max_element(costs.seconds);
  double mean = 0;
  for (const double one : costs.seconds) {
    mean += one / static_cast<double>(costs.seconds.size());
  }
  found.reason.diagnosis = format(
      "A microbatch takes the stages {}, forward and backward: stage {} ({}) "
      "takes {} longer than the average, and the others wait for it.",
      seconds_of_stages(costs.seconds), slowest - costs.seconds.begin(),
      ranks_text(costs.slowest_ranks), format_percent(*slowest / mean - 1));
  found.reason.why = format(
      "A pipeline is as fast as its slowest stage: the same passes in the same "
      "order, with even stages, end after {}, not {}.",
      format_seconds(costs.even), format_seconds(costs.as_they_are));
  const auto& job = evidence.run.job;
  if (!job) {
    found.reason.fix =
        "Partition the model so that the times of its stages are even "
        "(model.balance, model.cut).";
  } else if (!job->model.partition_at.empty()) {
    found.settings = {"model.cut=[]", "model.balance=\"measured\""};
    found.reason.fix =
        "Partition the model where its measured times are even, by the speed "
        "of each rank, not at the layers that model.cut names.";
  } else if (job->model.balance != StageBalance::measured) {
    found.settings = {"model.balance=\"measured\""};
    found.reason.fix = format(
        "Partition the model by the time that its layers take on each rank "
        "here, not by their {}.",
        job->model.balance == StageBalance::memory
            ? "memory"
            : "floating-point operations");
  } else {
    found.reason.fix =
        "Move layers away from that stage with model.cut, or take fewer "
        "stages: these layers cannot be partitioned evenly. If a rank became "
        "slower since the start, train.rebalance_every cuts the stages anew.";
  }
  return found;
}

std::vector<Settings> pipeline_fixes(const Job& job) {
  std::vector<Settings> all;
  const int64_t now = microbatches_of(job);
  const auto microbatches = [](int64_t count) {
    return format("layout.microbatches={}", count);
  };
  for (const int64_t factor : {2, 4, 8}) {
    all.push_back({microbatches(now * factor)});
  }
  const auto schedule = [](ScheduleKind kind) {
    return format("layout.schedule=\"{}\"", to_string(kind));
  };
  for (const int64_t factor : {1, 2, 4}) {
    for (const auto kind : {ScheduleKind::one_f_one_b, ScheduleKind::zb_h1}) {
      if (job.pipeline.schedule == kind || job.pipeline.stages_per_rank > 1) {
        continue;
      }
      all.push_back({schedule(kind), microbatches(now * factor)});
    }
    if (job.pipeline.schedule != ScheduleKind::interleaved) {
      all.push_back(
          {schedule(ScheduleKind::interleaved), "layout.stages_per_rank=2",
           microbatches(now * factor)});
    }
  }
  return all;
}

RunFinding bubble(const Evidence& evidence, double share, int64_t stages) {
  RunFinding found{.fault = Fault::bubble, .share = share};
  const double step = evidence.times.mean.step;
  found.reason.diagnosis = format(
      "The ranks of the pipeline wait for each other {} of each step of {}",
      format_seconds(share * step), format_seconds(step));
  const auto& job = evidence.run.job;
  if (!job || job->layout.pp == 1) {
    found.reason.diagnosis += ".";
    found.reason.fix = "Split the batch into more microbatches.";
    found.reason.why =
        "The more microbatches, the shorter the times in which the pipeline "
        "fills and empties.";
    return found;
  }
  const int64_t now = microbatches_of(*job);
  found.reason.diagnosis += format(
      ": {} {} {} stages, which fill and empty one after the other.", now,
      now == 1 ? "microbatch passes" : "microbatches pass", stages);
  if (const auto best = evidence.what_if.best_of(pipeline_fixes(*job))) {
    take_simulated_fix(evidence, *best, found);
    const cost::Strategy& strategy = best->configured.strategy;
    found.reason.fix = format(
        "Run {} with {}.", to_string(strategy.schedule),
        counted(strategy.num_microbatches(), "microbatch"));
    const auto bubble_share = [](const cost::StepEstimate& simulated) {
      return format_percent(simulated.parts.bubble / simulated.step_seconds);
    };
    found.reason.why = format(
        "The simulated bubble falls from {} to {} of the step: the fastest of "
        "the schedules and microbatches tried.",
        bubble_share(evidence.what_if.base()->step), bubble_share(best->step));
    return found;
  }
  found.reason.fix =
      "Take more samples in a step, in more microbatches, or fewer stages.";
  found.reason.why = evidence.what_if.none_found(
      "No schedule with more microbatches of this batch is faster; each "
      "microbatch would be too small.");
  return found;
}

// Waits that neither the schedule nor the stages explain: some passes take
// longer.
RunFinding unsteady_passes(const Evidence& evidence, double share) {
  const double step = evidence.times.mean.step;
  return {
      .fault = Fault::rank_imbalance,
      .share = share,
      .gain = share,
      .gain_source = GainSource::replayed,
      .reason = {
          .diagnosis = format(
              "The ranks of the pipeline wait {} of each step of {} longer "
              "than its schedule and its stages make them: the same pass "
              "sometimes takes longer.",
              format_seconds(share * step), format_seconds(step)),
          .fix =
              "Give each rank cores and a device that nothing else uses "
              "(train.threads, `echelon doctor`), and microbatches that take "
              "the same.",
          .why =
              "A late pass holds up all that follow it. With passes that "
              "always take their mean, the same schedule has no such waits."}};
}

}  // namespace

std::optional<StageCosts> stage_costs(
    const timeline::Timeline& timeline, const std::vector<int64_t>& steps) {
  std::vector<timeline::PipelineRows> passes;
  for (const int64_t step : steps) {
    timeline::PipelineRows rows =
        timeline::whole_passes(timeline::pipeline_rows(timeline, step));
    if (!rows.blocks.empty()) passes.push_back(std::move(rows));
  }
  if (passes.empty()) return {};
  const Sums sums = sums_of(passes);
  StageCosts costs;
  costs.seconds = by_stage(sums);
  double busy = 0;
  for (const timeline::PipelineRows& rows : passes) {
    const auto uneven =
        timeline::replayed(rows, [&](const timeline::PipelineBlock& block) {
          return sums.of_stage.at({block.kind, block.stage}).mean();
        });
    const auto even =
        timeline::replayed(rows, [&](const timeline::PipelineBlock& block) {
          return sums.of_all.at(block.kind).mean();
        });
    if (!uneven || !even) return {};
    const double weight = 1.0 / static_cast<double>(passes.size());
    costs.as_they_are += weight * timeline::makespan(*uneven);
    costs.even += weight * timeline::makespan(*even);
    busy += weight * (1 - timeline::bubble_fraction(*even, rows.rows.size()));
  }
  costs.busy_share = busy;
  const auto slowest = std::ranges::max_element(costs.seconds);
  const auto stage = static_cast<int32_t>(slowest - costs.seconds.begin());
  if (const auto found = sums.ranks.find(stage); found != sums.ranks.end()) {
    costs.slowest_ranks = found->second;
    std::ranges::sort(costs.slowest_ranks);
  }
  return costs;
}

std::vector<RunFinding> find_pipeline_waits(const Evidence& evidence) {
  if (!evidence.times.pipeline) return {};
  const auto costs = stage_costs(evidence.run.timeline, evidence.times.steps);
  if (!costs) return {};
  const double step = evidence.times.mean.step;
  const double waits = evidence.times.mean.for_stages / step;
  const double uneven =
      std::clamp((costs->as_they_are - costs->even) / step, 0.0, waits);
  std::vector<RunFinding> all;
  if (uneven >= kLeastShare) {
    all.push_back(uneven_stages(evidence, *costs, uneven));
  }
  const double empty = std::clamp(
      costs->even * (1 - costs->busy_share) / step, 0.0, waits - uneven);
  if (empty >= kLeastWait) {
    all.push_back(
        bubble(evidence, empty, static_cast<int64_t>(costs->seconds.size())));
  }
  if (const double rest = waits - uneven - empty; rest >= kLeastWait) {
    all.push_back(unsteady_passes(evidence, rest));
  }
  return all;
}

}  // namespace echelon::explain
