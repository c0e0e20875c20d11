// A rank's memory is its state (state_bytes.cpp), the activations of the
// microbatches that its schedule stores, the working memory of its largest
// stage, buffers, and what the framework reserves. The number of stored
// microbatches is a formula for each schedule, since a search cannot afford to
// generate schedules. Ranks of one place in the pipeline hold the same, so one
// of them is estimated.
#include "echelon/cost/memory_estimate.h"

#include <algorithm>
#include <optional>
#include <string>

#include "echelon/cost/framework.h"
#include "echelon/cost/strategy.h"

namespace echelon::cost {
namespace {

// Warm-up takes p microbatches through the first stage of a rank, then through
// the second, and so on, and starts over.
std::vector<double> interleaved(const PipelineShape& shape, int64_t rank) {
  const int64_t p = shape.ranks, v = shape.stages_per_rank;
  int64_t left =
      std::min(shape.microbatches * v, 2 * (p - rank - 1) + (v - 1) * p + 1);
  std::vector<double> stored(static_cast<size_t>(v));
  while (left > 0) {
    for (double& stage : stored) {
      const int64_t taken = std::min(left, p);
      stage += as_double(taken);
      left -= taken;
    }
  }
  return stored;
}

// The stages of a rank fill up together.
std::vector<double> even(int64_t all, int64_t stages) {
  return std::vector<double>(
      static_cast<size_t>(stages), as_double(all) / as_double(stages));
}

}  // namespace

std::vector<int64_t> stages_of_rank(const PipelineShape& shape, int64_t rank) {
  const int64_t p = shape.ranks;
  if (is_v_shaped(shape.schedule)) return {rank, 2 * p - 1 - rank};
  std::vector<int64_t> stages;
  for (int64_t i = 0; i < shape.stages_per_rank; ++i) {
    stages.push_back(i * p + rank);
  }
  return stages;
}

std::vector<double>
stored_microbatches(const PipelineShape& shape, int64_t rank) {
  const int64_t p = shape.ranks, v = shape.stages_per_rank,
                m = shape.microbatches;
  if (p == 1) return even(v, v);  // one at a time, whatever the schedule
  switch (shape.schedule) {
    case ScheduleKind::gpipe:
    case ScheduleKind::breadth_first:
      return even(v * m, v);
    case ScheduleKind::one_f_one_b:
      return even(v * std::min(m, p - rank), v);
    case ScheduleKind::interleaved:
      return interleaved(shape, rank);
    case ScheduleKind::zb_h1:
      return even(std::min(m, p), 1);
    case ScheduleKind::zb_h2:
      return even(std::min(m, 2 * p - 1), 1);
    case ScheduleKind::zb_v:
      return even(std::min(2 * m, 2 * p), 2);
    case ScheduleKind::dualpipev:
      return even(std::min(2 * m, 2 * p + 1), 2);
  }
  return {};
}

namespace {

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

// State of one rank after the other; neighbours mostly hold the same.
class StatesByRank {
 public:
  StatesByRank(const Strategy& strategy, const Framework& framework)
      : strategy_(strategy), framework_(framework) {}

  const StateBytes& of(const RankParameters& parameters) {
    if (!last_ || parameters != *last_) {
      last_ = parameters;
      bytes_ = state_bytes(parameters, strategy_, framework_);
    }
    return bytes_;
  }

 private:
  const Strategy& strategy_;
  const Framework& framework_;
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
    // Two messages have buffers at a time: one arrives and one leaves.
    if (pipeline.ranks > 1) sum.transfers = 2 * stage.output;
  }
  return sum;
}

}  // namespace

double MemoryEstimate::peak_bytes() const {
  return ranks.empty() ? reserved_bytes : bytes(static_cast<size_t>(fullest()));
}

double MemoryEstimate::bytes(size_t rank) const {
  return as_double(ranks[rank].total()) + reserved_bytes;
}

double MemoryEstimate::limit(size_t rank) const {
  return rank < limits.size() ? limits[rank] : 0;
}

double MemoryEstimate::fullness() const {
  return ranks.empty() ? reserved_bytes : share(static_cast<size_t>(fullest()));
}

double MemoryEstimate::share(size_t rank) const {
  return limit(rank) > 0 ? bytes(rank) / limit(rank) : bytes(rank);
}

int MemoryEstimate::fullest() const {
  double highest = -1;
  size_t most = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const double part = share(rank);
    if (part <= highest) continue;
    highest = part;
    most = rank;
  }
  return static_cast<int>(most);
}

MemoryEstimate
estimate_memory(const ModelShape& model, const Strategy& strategy) {
  const Framework& framework = find_framework(strategy.framework);
  const PipelineShape pipeline = pipeline_of(strategy);
  const auto parameters = stage_parameters(model, strategy);
  const auto activations = stage_activations(model, strategy, framework);
  MemoryEstimate estimate;
  estimate.ranks.reserve(static_cast<size_t>(pipeline.ranks));
  StatesByRank states(strategy, framework);
  double moving = 0;  // activations and working memory, the most of a rank
  for (int64_t rank = 0; rank < pipeline.ranks; ++rank) {
    const auto own = stages_of_rank(pipeline, rank);
    const StateBytes& state = states.of(sum_of(parameters, own));
    RankActivations one = activations_of(activations, own, pipeline, rank);
    double host = state.host_bytes;
    if (strategy.offload_activations) {
      host += one.kept;
      one.kept = 0;
    }
    timeline::MemoryByKind kinds = state.device;
    kinds[timeline::MemoryKind::activations] += static_cast<int64_t>(one.kept);
    kinds[timeline::MemoryKind::working] += static_cast<int64_t>(one.working);
    kinds[timeline::MemoryKind::communication] +=
        static_cast<int64_t>(framework.memory.buffer_bytes + one.transfers);
    estimate.ranks.push_back(kinds);
    estimate.host_bytes = std::max(estimate.host_bytes, host);
    moving = std::max(moving, one.kept + one.working);
  }
  estimate.reserved_bytes =
      framework.memory.context_bytes + framework.memory.fragment_share * moving;
  return estimate;
}

double least_bytes(const ModelShape& model, const Strategy& strategy) {
  const Framework& framework = find_framework(strategy.framework);
  const PipelineShape pipeline = pipeline_of(strategy);
  const auto parameters = stage_parameters(model, strategy);
  double most = 0;
  StatesByRank states(strategy, framework);
  for (int64_t rank = 0; rank < pipeline.ranks; ++rank) {
    const StateBytes& state =
        states.of(sum_of(parameters, stages_of_rank(pipeline, rank)));
    most = std::max(most, as_double(state.device.total()));
  }
  return most;
}

double usable_bytes(const cluster::Device& device) {
  // The rest is the driver's and other programs'. The job's own context is in
  // MemoryEstimate::reserved_bytes.
  return 0.99 * device.memory_bytes;
}

}  // namespace echelon::cost
