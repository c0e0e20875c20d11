#include <algorithm>

#include "echelon/cost/memory_estimate.h"
#include "echelon/explain/findings.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr double kNear = 0.92;   // of the limit: the next odd batch may not fit
constexpr double kSpare = 0.85;  // of it, that a run may use without worry

struct Peak {
  int32_t rank = -1;  // -1: not measured
  double bytes = 0;
  double limit = 0;  // 0: none is known
};

// Of the rank that is nearest to its limit.
Peak highest_peak(const Evidence& evidence) {
  Peak highest;
  for (const RankMemory& memory : evidence.run.timeline.memory) {
    Peak peak{memory.rank, 0, static_cast<double>(memory.limit_bytes)};
    for (const MemorySample& sample : memory.samples) {
      peak.bytes =
          std::max(peak.bytes, static_cast<double>(sample.memory.total()));
    }
    if (peak.limit == 0 && evidence.what_if.base()) {
      peak.limit =
          usable_bytes(evidence.what_if.cluster().node_of(memory.rank).device);
    }
    if (peak.limit == 0) continue;
    if (highest.rank < 0 ||
        peak.bytes / peak.limit > highest.bytes / highest.limit) {
      highest = peak;
    }
  }
  return highest;
}

std::string bytes_text(double bytes) {
  return format_bytes(static_cast<int64_t>(bytes));
}

std::string setting(const char* key, const std::string& value) {
  return std::string(key) + "=\"" + value + "\"";
}

// Less memory, the cheap ways first.
std::vector<Settings> savings_of(const Job& job) {
  std::vector<Settings> all;
  if (job.layout.dp_shard > 1 && job.shard.stage < 3) {
    all.push_back({"shard.stage=" + std::to_string(job.shard.stage + 1)});
    all.push_back({"shard.stage=3"});
  }
  if (job.layout.dp_replicate > 1) {
    all.push_back(
        {"layout.dp=1",
         "layout.fsdp=" + std::to_string(job.layout.data_degree())});
  }
  for (const int64_t factor : {2, 4}) {
    all.push_back(
        {"train.accumulate=" + std::to_string(job.train.accumulate * factor)});
  }
  if (job.memory.recompute == "none") {
    all.push_back({setting("memory.recompute", "selective")});
  }
  if (job.memory.recompute != "all") {
    all.push_back({setting("memory.recompute", "all")});
  }
  if (job.memory.offload == "none" && job.layout.dp_shard > 1) {
    all.push_back({setting("memory.offload", "optimizer")});
  }
  return all;
}

// The one that costs least of those that leave room.
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
  RunFinding found;
  found.fault = Fault::memory_pressure;
  found.ranks = {peak.rank};
  found.reason.diagnosis =
      "Rank " + std::to_string(peak.rank) + " held " + bytes_text(peak.bytes) +
      " at its peak, " + format_percent(peak.bytes / peak.limit) + " of the " +
      bytes_text(peak.limit) +
      " that it may use: a longer sample or another program ends the run.";
  found.reason.fix =
      "Cut more of the model over the ranks, or take smaller "
      "microbatches.";
  found.reason.why = evidence.what_if.none_found(
      "No single setting that the simulator knows saves enough.");
  const auto saving = cheapest_saving(evidence, peak);
  if (!saving) return found;
  found.settings = saving->settings;
  found.gain = evidence.what_if.gain(*saving);
  found.gain_source = GainSource::simulated;
  found.reason.fix = "Set " + to_text(saving->settings) + ".";
  found.reason.why = "It saves " +
                     bytes_text(
                         evidence.what_if.base()->step.memory.peak_bytes() -
                         saving->step.memory.peak_bytes()) +
                     " of a rank, the cheapest of the ways that leave room.";
  return found;
}

// Layers that are computed again, though all they would keep has room.
std::vector<RunFinding>
unneeded_recompute(const Evidence& evidence, const Peak& peak) {
  const auto& job = evidence.run.job;
  const WhatIf& what_if = evidence.what_if;
  if (!job || job->memory.recompute == "none" || !what_if.base()) return {};
  const auto without = what_if.with({"memory.recompute=\"none\""});
  if (!without || evidence.times.ranks.empty()) return {};
  const StepEstimate& now = what_if.base()->step;
  const double more =
      without->step.memory.peak_bytes() - now.memory.peak_bytes();
  const double bytes = peak.bytes + more;
  if (peak.rank < 0 || bytes > kSpare * peak.limit) return {};
  RunFinding found;
  found.fault = Fault::recompute;
  // What is computed again is a forward, or the part of it that the simulator
  // says.
  const StepParts& parts = now.parts;
  const double part =
      job->memory.recompute == "all" || parts.matrix + parts.memory <= 0
          ? 1.0
          : std::min(1.0, 3 * parts.recompute / (parts.matrix + parts.memory));
  found.share = part * evidence.shares.forward;
  if (found.share < kLeastShare) return {};
  found.settings = {"memory.recompute=\"none\""};
  found.gain = what_if.gain(*without);
  found.gain_source = GainSource::simulated;
  found.reason.diagnosis =
      "Backward computes layers again (memory.recompute = \"" +
      job->memory.recompute + "\"), which takes as long as the " +
      (part < 1 ? "part of forward that they are" : "forward before it") +
      ": " + format_percent(found.share) + " of the step. Rank " +
      std::to_string(peak.rank) + " held " + bytes_text(peak.bytes) +
      " of the " + bytes_text(peak.limit) + " that it may use.";
  found.reason.fix = "Keep what backward needs.";
  found.reason.why = "Keeping it takes " + bytes_text(more) + " more, " +
                     bytes_text(bytes) + " in all, which fit.";
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

}  // namespace echelon
