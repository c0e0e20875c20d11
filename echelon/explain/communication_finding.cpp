#include <algorithm>
#include <set>
#include <utility>

#include "echelon/explain/findings.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/text/units.h"
#include "echelon/timeline/intervals.h"
#include "echelon/timeline/overlap.h"

namespace echelon {
namespace {

struct Traffic {
  double calls = 0;  // of a rank in a step
  double bytes = 0;
  double seconds = 0;  // in which one is on its way, hidden or not
};

bool is_along(const std::string& axis, const std::string& name) {
  if (name == "dp") return axis == "dp_replicate" || axis == "data";
  if (name == "fsdp") return axis == "dp_shard";
  return axis == name;
}

Traffic traffic_along(const Evidence& evidence, const std::string& name) {
  const std::set<int64_t> steps(
      evidence.times.steps.begin(), evidence.times.steps.end());
  Traffic traffic;
  for (const auto& activity : step_activities(evidence.run.timeline)) {
    if (!steps.contains(activity.step)) continue;
    std::vector<Interval> on_their_way;
    for (const Span* span : activity.spans) {
      if (span->kind != SpanKind::communication ||
          !is_along(span->axis, name)) {
        continue;
      }
      traffic.calls += 1;
      traffic.bytes += static_cast<double>(span->bytes);
      on_their_way.push_back({span->begin_ns, span->end_ns});
    }
    traffic.seconds +=
        1e-9 *
        static_cast<double>(total_length(merged(std::move(on_their_way))));
  }
  const double all =
      static_cast<double>(steps.size() * evidence.times.ranks.size());
  for (double* one : {&traffic.calls, &traffic.bytes, &traffic.seconds}) {
    *one /= std::max(1.0, all);
  }
  return traffic;
}

Settings set(const char* key, int64_t value) {
  return {std::string(key) + "=" + std::to_string(value)};
}

// What may make less of it, or hide more; each is tried.
std::vector<Settings> fixes_of(const Job& job, const std::string& name) {
  std::vector<Settings> all;
  const Layout& layout = job.layout;
  if (name == "fsdp") {
    all.push_back({"shard.gather=\"step\""});
    all.push_back(set("shard.stage", 2));
    all.push_back(set("shard.stage", 1));
    all.push_back(
        {"layout.fsdp=1",
         "layout.dp=" + std::to_string(layout.dp_replicate * layout.dp_shard)});
  }
  if (name == "tp") {
    for (int64_t tp = layout.tp / 2; tp >= 1 && layout.tp % tp == 0; tp /= 2) {
      all.push_back(
          {"layout.tp=" + std::to_string(tp),
           "layout.dp=" +
               std::to_string(layout.dp_replicate * layout.tp / tp)});
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
          "train.accumulate=" + std::to_string(job.train.accumulate * factor));
      all.push_back(std::move(more));
    }
  }
  return all;
}

// A single collective can only begin when the last gradient is there.
bool is_one_bucket(const Evidence& evidence, const Traffic& traffic) {
  const Job& job = *evidence.run.job;
  return traffic.calls > 0 && traffic.calls < 1.5 && !shards_parameters(job) &&
         traffic.bytes > 64 << 10;
}

void cut_into_buckets(
    const Evidence& evidence, const Traffic& traffic, RunFinding& found) {
  constexpr double kBuckets = 8;
  const auto bytes = std::max<int64_t>(
      64 << 10, static_cast<int64_t>(traffic.bytes / kBuckets));
  const double step = evidence.times.mean.step;
  // All but the last can go while backward still computes.
  const double hidden = std::min(
      found.share * (1 - 1 / kBuckets),
      (1 - 1 / kBuckets) * evidence.times.mean.backward / step);
  found.settings = set("train.bucket_bytes", bytes);
  found.gain = hidden;
  found.gain_source = GainSource::measured;
  found.reason.fix = "Sum gradients in buckets of " + format_bytes(bytes) +
                     ", which leave while backward still computes.";
  found.reason.why = "All " +
                     format_bytes(static_cast<int64_t>(traffic.bytes)) +
                     " of gradients are one collective, which begins when the "
                     "last one is there; "
                     "backward takes " +
                     format_seconds(evidence.times.mean.backward) +
                     ", behind which the buckets before the last can hide.";
}

// Settings that hide it in the layout as it is; `hidden` of the share, at best.
void hide(
    const Settings& settings, double hidden, const std::string& fix,
    const std::string& why, RunFinding& found) {
  found.settings = settings;
  found.gain = hidden * found.share;
  found.gain_source = GainSource::measured;
  found.reason.fix = fix;
  found.reason.why = why;
}

bool is_hidden_by_a_setting(
    const Job& job, const std::string& name, const Traffic& traffic,
    RunFinding& found) {
  if (name == "tp" && job.tensor.overlap_chunks == 1) {
    constexpr int64_t kChunks = 4;
    hide(
        set("layout.overlap_chunks", kChunks), 1 - 1.0 / kChunks,
        "Compute products in " + std::to_string(kChunks) + " pieces.",
        "While a piece is computed, the one before it is summed over the "
        "ranks: at "
        "best all but the last hide.",
        found);
    return true;
  }
  if (name == "fsdp" && job.shard.prefetch == 0 && traffic.calls > 1) {
    hide(
        set("shard.prefetch", 1), 1 - 1 / traffic.calls,
        "Gather parameters a unit ahead.",
        "While a unit is computed, the next one's parameters come: at best all "
        "but "
        "the first hide.",
        found);
    return true;
  }
  return false;
}

void advise(
    const Evidence& evidence, const std::string& name, const Traffic& traffic,
    RunFinding& found) {
  if (name == "dp" && is_one_bucket(evidence, traffic)) {
    return cut_into_buckets(evidence, traffic, found);
  }
  const Job& job = *evidence.run.job;
  if (is_hidden_by_a_setting(job, name, traffic, found)) return;
  if (const auto best = evidence.what_if.best_of(fixes_of(job, name))) {
    found.settings = best->settings;
    found.gain = evidence.what_if.gain(*best);
    found.gain_source = GainSource::simulated;
    found.reason.fix = "Set " + to_text(best->settings) + ".";
    const bool batch = best->settings.front().starts_with("train.batch");
    found.reason.why = batch ? "Gradients are summed, and parameters updated, "
                               "once a step: with more "
                               "samples in it, each pays less for both. It is "
                               "another training: look "
                               "at the learning rate."
                             : "Of the settings that send less along " + name +
                                   " or send it beside computation, the "
                                   "simulator finds this one "
                                   "fastest.";
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
    RunFinding found;
    found.fault = Fault::exposed_communication;
    found.axis = name;
    found.share = share;
    const double step = evidence.times.mean.step;
    found.reason.diagnosis =
        (name == "pp" ? "Messages between pipeline stages take "
                      : "Collectives along " + name + " take ") +
        format_seconds(traffic.seconds) + " of each step of " +
        format_seconds(step) + " (" +
        format_bytes(static_cast<int64_t>(traffic.bytes)) + " in " +
        format_number(traffic.calls) +
        (traffic.calls == 1 ? " call" : " calls") + " a rank), and " +
        format_seconds(share * step) + " of it while nothing computes.";
    if (evidence.run.job) {
      advise(evidence, name, traffic, found);
    } else {
      found.reason.fix =
          "Let it run beside computation, or send less along " + name + ".";
      found.reason.why =
          "Without the run's configuration no setting can be tried.";
    }
    all.push_back(std::move(found));
  }
  return all;
}

}  // namespace echelon
