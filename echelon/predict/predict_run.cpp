#include "echelon/predict/predict_run.h"

#include <algorithm>
#include <utility>

#include "echelon/cluster/local_cluster.h"
#include "echelon/cost/choices.h"
#include "echelon/error.h"
#include "echelon/layout/mesh.h"
#include "echelon/text/format.h"
#include "echelon/timeline/overlap.h"

namespace echelon::predict {
namespace {

constexpr int64_t kMostRanks = 64;  // with spans and memory
constexpr int64_t kFewRanks = 16;   // with spans

std::string how_to_measure(int64_t ranks) {
  return format(
      "The rates of this processor are not known, so that nothing is "
      "predicted. `echelon bench --save -n {}` measures them once for runs of "
      "{} {}.",
      ranks, ranks, ranks == 1 ? "rank" : "ranks");
}

std::vector<report::PredictedMemory>
memory_of(const cost::MemoryEstimate& estimate, const Layout& layout) {
  std::vector<report::PredictedMemory> list;
  const Mesh mesh(layout);
  for (int64_t rank = 0; rank < std::min(mesh.size(), kMostRanks); ++rank) {
    const auto stage = static_cast<size_t>(mesh.coordinate(rank, Axis::pp));
    if (stage >= estimate.ranks.size()) continue;
    list.push_back({static_cast<int32_t>(rank), estimate.ranks[stage]});
  }
  return list;
}

}  // namespace

RunCluster cluster_of_run(int64_t ranks, bool on_processor) {
  RunCluster found;
  try {
    cluster::LocalCluster here = cluster::local_cluster(ranks, on_processor);
    if (here.rates == cluster::RatesFrom::guess) {
      found.missing = how_to_measure(ranks);
    } else {
      found.cluster = std::move(here.cluster);
    }
  } catch (const Error& error) {
    found.missing = std::string("Nothing is predicted: ") + error.what();
  }
  return found;
}

bool ran_on_processor(const timeline::Timeline& timeline) {
  return std::any_of(
      timeline.rank_names.begin(), timeline.rank_names.end(),
      [](const std::string& name) { return name.ends_with("(cpu)"); });
}

report::StepPrediction prediction_of(
    const simulator::SimulatedRun& run, const cost::Strategy& strategy,
    const cluster::Cluster& cluster) {
  report::StepPrediction prediction;
  prediction.cluster = cluster.name;
  prediction.step_seconds = run.step.step_seconds;
  prediction.parts =
      timeline::timed_parts(run.timeline, timeline::diagnose(run.timeline));
  // A framework's other work has no spans.
  prediction.parts.other +=
      std::max(0.0, prediction.step_seconds - prediction.parts.step_seconds());
  prediction.memory = memory_of(run.step.memory, strategy.layout);
  return prediction;
}

report::StepPrediction
predict_step(const Configured& what, const cluster::Cluster& cluster) {
  const cost::Strategy strategy =
      cost::with_choices(what.model, what.strategy, cluster);
  // At least one pipeline; other ranks do much the same.
  const Layout& layout = strategy.layout;
  const int64_t ranks = std::clamp<int64_t>(layout.pp, kFewRanks, kMostRanks);
  const simulator::SimulatedRun run = simulator::simulate(
      what.model, strategy, cluster,
      {.timeline_ranks = std::min(ranks, layout.num_ranks())});
  return prediction_of(run, strategy, cluster);
}

}  // namespace echelon::predict
