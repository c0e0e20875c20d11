#include <algorithm>

#include "echelon/cost/memory_estimate.h"
#include "echelon/explain/findings.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::explain {
namespace {

constexpr double kNear = 0.92;   // of the limit: an unusual batch may not fit
constexpr double kSpare = 0.85;  // of the limit: a run may safely use this

struct Peak {
  int32_t rank = -1;  // -1: not measured
  double bytes = 0;
  double limit = 0;  // 0: none is known
};

// The peak of the rank that is nearest to its limit.
Peak highest_peak(const Evidence& evidence) {
  Peak highest;
  for (const timeline::RankMemory& memory : evidence.run.timeline.memory) {
    Peak peak{memory.rank, 0, static_cast<double>(memory.limit_bytes)};
    for (const timeline::MemorySample& sample : memory.samples) {
      peak.bytes =
          std::max(peak.bytes, static_cast<double>(sample.memory.total()));
    }
    if (peak.limit == 0 && evidence.what_if.base()) {
      peak.limit = cost::usable_bytes(
          evidence.what_if.cluster().node_of(memory.rank).device);
    }
    if (peak.limit == 0) continue;
    if (highest.rank < 0 ||
        peak.bytes / peak.limit > highest.bytes / highest.limit) {
      highest = peak;
    }
  }
  return highest;
}

// Settings that save memory, the cheap ones first.
std::vector<Settings> savings_of(const Job& job) {
  std::vector<Settings> all;
  if (job.layout.dp_shard > 1 && job.shard.stage < 3) {
    all.push_back({format("shard.stage={}", job.shard.stage + 1)});
    all.push_back({"shard.stage=3"});
  }
  if (job.layout.dp_replicate > 1) {
    all.push_back(
        {"layout.dp=1", format("layout.fsdp={}", job.layout.data_degree())});
  }
  for (const int64_t factor : {2, 4}) {
    all.push_back(
        {format("train.accumulate={}", job.train.accumulate * factor)});
  }
  if (job.memory.recompute == Recompute::none) {
    all.push_back({"memory.recompute=\"selective\""});
  }
  if (job.memory.recompute != Recompute::all) {
    all.push_back({"memory.recompute=\"all\""});
  }
  if (job.memory.offload == Offload::none && job.layout.dp_shard > 1) {
    all.push_back({"memory.offload=\"optimizer\""});
  }
  return all;
}

// The cheapest of the settings that leave room.
std::optional<WhatIfStep>
cheapest_saving(const Evidence& evidence, const Peak& peak) {
  const WhatIf& what_if = evidence.what_if;
  if (!what_if.base()) return {};
  const double now = what_if.base()->step.memory.peak_bytes();
  std::optional<WhatIfStep> best;
  for (const Settings& settings : savings_of(*evidence.run.job)) {
    auto other = what_if.with(settings);
    if (!other) continue;
    const double bytes = peak.bytes - (now - other->step.memory.peak_bytes());
    if (bytes > kSpare * peak.limit) continue;
    if (!best || other->seconds_per_sample < best->seconds_per_sample) {
      best = std::move(other);
    }
  }
  return best;
}

RunFinding pressure(const Evidence& evidence, const Peak& peak) {
  RunFinding found{.fault = Fault::memory_pressure, .ranks = {peak.rank}};
  found.reason.diagnosis = format(
      "Rank {} held {} at its peak, {} of the {} that it may use: a longer "
      "sample or another program would end the run.",
      peak.rank, format_bytes(peak.bytes),
      format_percent(peak.bytes / peak.limit), format_bytes(peak.limit));
  found.reason.fix =
      "Shard more of the model over the ranks, or take smaller microbatches.";
  found.reason.why = evidence.what_if.none_found(
      "No single setting that the simulator knows saves enough.");
  const auto saving = cheapest_saving(evidence, peak);
  if (!saving) return found;
  take_simulated_fix(evidence, *saving, found);
  found.reason.fix = "Set " + to_text(saving->settings) + ".";
  const double saved = evidence.what_if.base()->step.memory.peak_bytes() -
                       saving->step.memory.peak_bytes();
  found.reason.why = format(
      "It saves {} of a rank, the cheapest of the ways that leave room.",
      format_bytes(saved));
  return found;
}

// Recompute of layers whose activations would fit.
std::vector<RunFinding>
unneeded_recompute(const Evidence& evidence, const Peak& peak) {
  const auto& job = evidence.run.job;
  const WhatIf& what_if = evidence.what_if;
  if (!job || job->memory.recompute == Recompute::none || !what_if.base())
    return {};
  const auto without = what_if.with({"memory.recompute=\"none\""});
  if (!without || evidence.times.ranks.empty()) return {};
  const cost::StepEstimate& now = what_if.base()->step;
  const double more =
      without->step.memory.peak_bytes() - now.memory.peak_bytes();
  const double bytes = peak.bytes + more;
  if (peak.rank < 0 || bytes > kSpare * peak.limit) return {};
  RunFinding found;
  found.fault = Fault::recompute;
  // Recompute repeats a forward, or the simulated part of one.
  const cost::StepParts& parts = now.parts;
  const double part =
      job->memory.recompute == Recompute::all ||
              parts.matrix + parts.memory <= 0
          ? 1.0
          : std::min(1.0, 3 * parts.recompute / (parts.matrix + parts.memory));
  found.share = part * evidence.shares.forward;
  if (found.share < kLeastShare) return {};
  take_simulated_fix(evidence, *without, found);
  found.reason.diagnosis = format(
      "Backward recomputes layers (memory.recompute = \"{}\"), which takes as "
      "long as the {}: {} of the step. Rank {} held {} of the {} that it may "
      "use.",
      to_string(job->memory.recompute),
      part < 1 ? "same part of forward" : "forward before it",
      format_percent(found.share), peak.rank, format_bytes(peak.bytes),
      format_bytes(peak.limit));
  found.reason.fix = "Keep what backward needs.";
  found.reason.why = format(
      "Keeping it takes {} more, {} in all, which fit.", format_bytes(more),
      format_bytes(bytes));
  return {found};
}

}  // namespace

std::vector<RunFinding> find_memory(const Evidence& evidence) {
  const Peak peak = highest_peak(evidence);
  if (peak.rank < 0) return {};
  if (peak.bytes >= kNear * peak.limit) {
    if (!evidence.run.job) return {};
    return {pressure(evidence, peak)};
  }
  return unneeded_recompute(evidence, peak);
}

}  // namespace echelon::explain
