// Each axis whose exposed communication is worth a finding gets one. Its fix is
// the first that applies: smaller buckets, a setting that hides communication
// in the same layout, the best of other settings by simulation, or advice in
// words. The gain of the first two is estimated from the recorded times.
#include <algorithm>
#include <set>
#include <utility>

#include "echelon/explain/findings.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/predict/predict_run.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/timeline/intervals.h"
#include "echelon/timeline/overlap.h"

namespace echelon::explain {
namespace {

struct Traffic {
  double calls = 0;  // of a rank in a step
  double bytes = 0;
  double seconds = 0;  // in which one is in flight, hidden or exposed
};

Traffic traffic_along(const Evidence& evidence, const std::string& name) {
  const std::set<int64_t> steps(
      evidence.times.steps.begin(), evidence.times.steps.end());
  Traffic traffic;
  for (const auto& activity :
       timeline::step_activities(evidence.run.timeline)) {
    if (!steps.contains(activity.step)) continue;
    std::vector<timeline::Interval> in_flight;
    for (const timeline::Span* span : activity.spans) {
      if (span->kind != timeline::SpanKind::communication ||
          axis_of_group(span->axis) != name) {
        continue;
      }
      traffic.calls += 1;
      traffic.bytes += static_cast<double>(span->bytes);
      in_flight.push_back({span->begin_ns, span->end_ns});
    }
    traffic.seconds +=
        timeline::total_seconds(timeline::merged(std::move(in_flight)));
  }
  const double all =
      static_cast<double>(steps.size() * evidence.times.ranks.size());
  for (double* one : {&traffic.calls, &traffic.bytes, &traffic.seconds}) {
    *one /= std::max(1.0, all);
  }
  return traffic;
}

Settings set(const char* key, int64_t value) {
  return {format("{}={}", key, value)};
}

// Settings that may send less or hide more. Each is tried.
std::vector<Settings>
communication_fixes(const Job& job, const std::string& name) {
  std::vector<Settings> all;
  const Layout& layout = job.layout;
  if (name == "fsdp") {
    all.push_back({"shard.gather=\"step\""});
    all.push_back(set("shard.stage", 2));
    all.push_back(set("shard.stage", 1));
    all.push_back(
        {"layout.fsdp=1", format("layout.dp={}", layout.data_degree())});
  }
  if (name == "tp") {
    for (int64_t tp = layout.tp / 2; tp >= 1 && layout.tp % tp == 0; tp /= 2) {
      all.push_back(
          {format("layout.tp={}", tp),
           format("layout.dp={}", layout.dp_replicate * layout.tp / tp)});
      if (tp == 1) break;
    }
    if (!job.tensor.sequence_parallel) {
      all.push_back({"layout.sequence_parallel=true"});
    }
  }
  if (name == "pp") {
    const int64_t now = microbatches_of(job);
    if (now % 2 == 0) all.push_back(set("layout.microbatches", now / 2));
    if (job.pipeline.stages_per_rank > 1) {
      all.push_back({"layout.schedule=\"1f1b\"", "layout.stages_per_rank=1"});
    }
  }
  if (name == "dp" || name == "fsdp") {
    for (const int64_t factor : {2, 4}) {
      Settings more = set("train.batch", job.train.batch * factor);
      more.push_back(
          format("train.accumulate={}", job.train.accumulate * factor));
      all.push_back(std::move(more));
    }
  }
  return all;
}

// A single collective can only begin after the last gradient.
bool is_one_bucket(const Evidence& evidence, const Traffic& traffic) {
  const Job& job = *evidence.run.job;
  return traffic.calls > 0 && traffic.calls < 1.5 && !shards_parameters(job) &&
         traffic.bytes > 64 << 10;
}

void split_into_buckets(
    const Evidence& evidence, const Traffic& traffic, RunFinding& found) {
  constexpr double kBuckets = 8;
  const auto bytes = std::max<int64_t>(
      64 << 10, static_cast<int64_t>(traffic.bytes / kBuckets));
  const double step = evidence.times.mean.step;
  // All but the last can be sent while backward still computes.
  const double hidden = std::min(
      found.share * (1 - 1 / kBuckets),
      (1 - 1 / kBuckets) * evidence.times.mean.backward / step);
  found.settings = set("train.bucket_bytes", bytes);
  found.gain = hidden;
  found.gain_source = GainSource::measured;
  found.reason.fix = format(
      "Reduce gradients in buckets of {}, which are sent while backward still "
      "computes.",
      format_bytes(bytes));
  found.reason.why = format(
      "All {} of gradients are one collective, which begins after the last "
      "one; backward takes {}, which can hide all buckets but the last.",
      format_bytes(traffic.bytes),
      format_seconds(evidence.times.mean.backward));
}

// Takes settings that hide up to `hidden` of the share in the same layout.
void hide(
    const Settings& settings, double hidden, const std::string& fix,
    const std::string& why, RunFinding& found) {
  found.settings = settings;
  found.gain = hidden * found.share;
  found.gain_source = GainSource::measured;
  found.reason.fix = fix;
  found.reason.why = why;
}

// Whether matmuls had one chunk. By itself the trainer takes more on GPUs,
// where the cost model says so.
bool is_one_chunk(const Evidence& evidence) {
  const int64_t chunks = evidence.run.job->tensor.overlap_chunks;
  return chunks == 1 ||
         (chunks == 0 && predict::ran_on_processor(evidence.run.timeline));
}

bool is_hidden_by_a_setting(
    const Evidence& evidence, const std::string& name, const Traffic& traffic,
    RunFinding& found) {
  const Job& job = *evidence.run.job;
  if (name == "tp" && is_one_chunk(evidence)) {
    constexpr int64_t kChunks = 4;
    hide(
        set("layout.overlap_chunks", kChunks), 1 - 1.0 / kChunks,
        format("Compute matmuls in {} chunks.", kChunks),
        "While a chunk is computed, the one before it is reduced over the "
        "ranks: at best all but the last are hidden.",
        found);
    return true;
  }
  if (name == "fsdp" && job.shard.prefetch == 0 && traffic.calls > 1) {
    hide(
        set("shard.prefetch", 1), 1 - 1 / traffic.calls,
        "Unshard parameters one unit ahead.",
        "While a unit is computed, the next one's parameters are all-gathered: "
        "at best all but the first are hidden.",
        found);
    return true;
  }
  return false;
}

// Takes the first advice that applies: gradients in buckets, a setting that
// hides communication without another layout, the fastest of the simulated
// settings, or advice without a setting.
void advise(
    const Evidence& evidence, const std::string& name, const Traffic& traffic,
    RunFinding& found) {
  if (name == "dp" && is_one_bucket(evidence, traffic)) {
    return split_into_buckets(evidence, traffic, found);
  }
  const Job& job = *evidence.run.job;
  if (is_hidden_by_a_setting(evidence, name, traffic, found)) return;
  if (const auto best =
          evidence.what_if.best_of(communication_fixes(job, name))) {
    take_simulated_fix(evidence, *best, found);
    found.reason.fix = "Set " + to_text(best->settings) + ".";
    const bool batch = best->settings.front().starts_with("train.batch");
    found.reason.why =
        batch ? "Gradients are reduced, and parameters updated, once a step: "
                "with more samples in it, each pays less for both. The "
                "training changes: adjust the learning rate."
              : format(
                    "Of the settings that send less along {} or overlap it "
                    "with computation, the simulator finds this one fastest.",
                    name);
    return;
  }
  found.reason.fix =
      name == "tp"
          ? "Keep the ranks of tp on the fastest links, or use fewer of them."
      : name == "pp"
          ? "Use faster links between stages, fewer stages, or larger "
            "microbatches."
          : "Use faster links for " + name + ", or fewer ranks along it.";
  found.reason.why = evidence.what_if.none_found(
      "The simulator finds no setting that sends less and fits.");
}

}  // namespace

std::vector<RunFinding> find_exposed_communication(const Evidence& evidence) {
  std::vector<RunFinding> all;
  for (const auto& [name, share] : evidence.shares.communication) {
    if (name.empty() || share < kLeastWait) continue;
    const Traffic traffic = traffic_along(evidence, name);
    RunFinding found{
        .fault = Fault::exposed_communication, .axis = name, .share = share};
    const double step = evidence.times.mean.step;
    found.reason.diagnosis = format(
        "{} take {} of each step of {} ({} in {} {} a rank), and {} of it "
        "while nothing computes.",
        name == "pp" ? "Messages between pipeline stages"
                     : "Collectives along " + name,
        format_seconds(traffic.seconds), format_seconds(step),
        format_bytes(traffic.bytes), format_number(traffic.calls),
        traffic.calls == 1 ? "call" : "calls", format_seconds(share * step));
    if (evidence.run.job) {
      advise(evidence, name, traffic, found);
    } else {
      found.reason.fix =
          format("Overlap it with computation, or send less along {}.", name);
      found.reason.why =
          "Without the run's configuration no setting can be tried.";
    }
    all.push_back(std::move(found));
  }
  return all;
}

}  // namespace echelon::explain
