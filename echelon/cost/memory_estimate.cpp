#include "echelon/cost/memory_estimate.h"

#include <algorithm>
#include <optional>
#include <string>

#include "echelon/cost/stack.h"
#include "echelon/cost/stage_activations.h"
#include "echelon/cost/stage_cut.h"
#include "echelon/cost/state_bytes.h"
#include "echelon/cost/stored_microbatches.h"

namespace echelon {
namespace {

int64_t whole(double bytes) {
  return static_cast<int64_t>(bytes);
}

PipelineShape pipeline_of(const Strategy& strategy) {
  return {
      .schedule = strategy.schedule,
      .ranks = strategy.layout.pp,
      .stages_per_rank = num_stages(strategy) / strategy.layout.pp,
      .microbatches = std::max<int64_t>(1, strategy.num_microbatches())};
}

RankParameters sum_of(
    const std::vector<RankParameters>& stages,
    const std::vector<int64_t>& own) {
  RankParameters rank;
  for (const int64_t stage : own) {
    const RankParameters& one = stages[static_cast<size_t>(stage)];
    rank.dense += one.dense;
    rank.experts += one.experts;
    rank.largest_unit = std::max(rank.largest_unit, one.largest_unit);
    rank.embedding_and_head += one.embedding_and_head;
  }
  return rank;
}

// Of one rank after the other: neighbours mostly hold as much.
class StatesByRank {
 public:
  StatesByRank(const Strategy& strategy, const Stack& stack)
      : strategy_(strategy), stack_(stack) {}

  const StateBytes& of(const RankParameters& parameters) {
    if (!last_ || parameters != *last_) {
      last_ = parameters;
      bytes_ = state_bytes(parameters, strategy_, stack_);
    }
    return bytes_;
  }

 private:
  const Strategy& strategy_;
  const Stack& stack_;
  std::optional<RankParameters> last_;
  StateBytes bytes_;
};

struct RankActivations {
  double kept = 0;
  double working = 0;
  double transfers = 0;
};

RankActivations activations_of(
    const std::vector<ActivationBytes>& stages, const std::vector<int64_t>& own,
    const PipelineShape& pipeline, int64_t rank) {
  RankActivations sum;
  const auto stored = stored_microbatches(pipeline, rank);
  for (size_t i = 0; i < own.size(); ++i) {
    const ActivationBytes& stage = stages[static_cast<size_t>(own[i])];
    sum.kept += stored[i] * stage.kept;
    sum.working = std::max(sum.working, stage.working);
    // One that arrives and one that leaves.
    if (pipeline.ranks > 1) sum.transfers = 2 * stage.output;
  }
  return sum;
}

}  // namespace

double MemoryEstimate::peak_bytes() const {
  return ranks.empty() ? reserved_bytes : bytes(static_cast<size_t>(fullest()));
}

double MemoryEstimate::bytes(size_t rank) const {
  return static_cast<double>(ranks[rank].total()) + reserved_bytes;
}

double MemoryEstimate::limit(size_t rank) const {
  return rank < limits.size() ? limits[rank] : 0;
}

double MemoryEstimate::fullness() const {
  if (ranks.empty()) return reserved_bytes;
  const auto rank = static_cast<size_t>(fullest());
  return limit(rank) > 0 ? bytes(rank) / limit(rank) : bytes(rank);
}

int MemoryEstimate::fullest() const {
  double highest = -1;
  size_t most = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    double part = bytes(rank);
    if (limit(rank) > 0) part /= limit(rank);
    if (part <= highest) continue;
    highest = part;
    most = rank;
  }
  return static_cast<int>(most);
}

MemoryEstimate estimate_memory(
    const ModelShape& model, const Strategy& strategy, const Cluster&) {
  const Stack& stack = find_stack(strategy.stack);
  const PipelineShape pipeline = pipeline_of(strategy);
  const auto parameters = stage_parameters(model, strategy);
  const auto activations = stage_activations(model, strategy, stack);
  MemoryEstimate estimate;
  estimate.ranks.reserve(static_cast<size_t>(pipeline.ranks));
  StatesByRank states(strategy, stack);
  double moving = 0;  // what comes and goes, of the rank with most
  for (int64_t rank = 0; rank < pipeline.ranks; ++rank) {
    const auto own = stages_of_rank(pipeline, rank);
    const StateBytes& state = states.of(sum_of(parameters, own));
    RankActivations one = activations_of(activations, own, pipeline, rank);
    double host = state.host_bytes;
    if (strategy.offload_activations) {
      host += one.kept;
      one.kept = 0;
    }
    MemoryByKind kinds = state.device;
    kinds[MemoryKind::activations] += whole(one.kept);
    kinds[MemoryKind::working] += whole(one.working);
    kinds[MemoryKind::communication] +=
        whole(stack.memory.buffer_bytes + one.transfers);
    estimate.ranks.push_back(kinds);
    estimate.host_bytes = std::max(estimate.host_bytes, host);
    moving = std::max(moving, one.kept + one.working);
  }
  estimate.reserved_bytes =
      stack.memory.context_bytes + stack.memory.fragment_share * moving;
  return estimate;
}

double least_bytes(const ModelShape& model, const Strategy& strategy) {
  const Stack& stack = find_stack(strategy.stack);
  const PipelineShape pipeline = pipeline_of(strategy);
  const auto parameters = stage_parameters(model, strategy);
  double most = 0;
  StatesByRank states(strategy, stack);
  for (int64_t rank = 0; rank < pipeline.ranks; ++rank) {
    const StateBytes& state =
        states.of(sum_of(parameters, stages_of_rank(pipeline, rank)));
    most = std::max(most, static_cast<double>(state.device.total()));
  }
  return most;
}

double usable_bytes(const Device& device) {
  // The driver and other programs' share of what is reported; what the job's
  // own context takes is MemoryEstimate::reserved_bytes.
  return 0.99 * device.memory_bytes;
}

}  // namespace echelon
