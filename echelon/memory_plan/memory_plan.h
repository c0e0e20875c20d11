// What each rank of a job holds at its fullest moment, by kind, and what a step
// sends: found by walking a step's events, without running it.
//
//   const MemoryModel model = count_memory(job, source);    // count_memory.h
//   const MemoryPlan plan = plan_memory(model, job);
//   plan.ranks[0].peak[MemoryKind::activations];
//
// Free of LibTorch. Figures are bytes of tensors; what libraries allocate by
// themselves and what an allocator keeps unused are not among them.
// Sources: Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054 (states);
// Korthikanti et al., 2022, arXiv:2205.05198 (activations).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cost/choose_recompute.h"
#include "echelon/job/job.h"
#include "echelon/schedule/schedule.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon {

/// What a layer does with memory in one microbatch: LayerCost, where fields of
/// these names are explained.
struct LayerUse {
  int64_t kept_bytes = 0;  // activation_bytes
  int64_t repeated_bytes = 0;
  int64_t forward_peak_bytes = 0;
  int64_t backward_peak_bytes = 0;
  int64_t backward_peak_gradient_bytes = 0;
  int64_t backward_working_bytes = 0;
};

/// Calls of one kind in a step.
struct PlannedCalls {
  std::string operation;  // "all_gather"
  std::string axis;       // "dp_shard"
  std::string what;       // "parameters of transformer.h.0"
  int64_t count = 0;
  int64_t bytes = 0;  // of this rank's inputs, all calls together
  bool operator==(const PlannedCalls&) const = default;
};

struct PlannedParameter {
  int64_t numel = 0;
  bool decays = false;  // two dimensions or more
  bool trains = true;
};

/// One layer as a rank has it.
struct PlannedLayer {
  std::string name;
  std::vector<PlannedParameter> parameters;  // those tied to an earlier layer's
                                             // are left out
  std::vector<size_t> tied_to;  // layers whose parameters it uses too
  int64_t buffer_bytes = 0;
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  std::array<double, 3> again_flops{};      // that backward computes once more
  std::array<LayerUse, 3> use;              // recompute: none, selective, all
  std::vector<PlannedCalls> forward_calls;  // of one microbatch
  std::array<std::vector<PlannedCalls>, 3> backward_calls;
};

/// A parameter that several stages use; each has its own, and their gradients
/// are summed when a step's backwards have ended.
struct PlannedTie {
  std::vector<size_t> layers;  // the first of each stage that has it
  int64_t numel = 0;
  bool trains = true;
};

/// What is counted once for a model and a batch, whatever is done about memory.
/// Of tensor-parallel ranks it is the first one's, none has more.
struct MemoryModel {
  std::vector<PlannedLayer> layers;  // the last one is the loss
  std::vector<size_t> boundaries;    // of stages; the loss is in the last
  std::vector<PlannedTie> ties;      // across stages
  Schedule schedule;                 // of one rank where there is no pipeline
  int64_t master_bytes = 4;          // of an element of a parameter
  int64_t compute_bytes = 4;         // as layers see it
  int64_t num_parameters = 0;        // of the whole model
  /// The ranks compute in the host's memory: offloading saves nothing there.
  bool host_is_device = false;
  int64_t batch_bytes = 0;         // inputs and targets of a step, on this rank
  std::vector<std::string> notes;  // what the figures leave open
};

struct RankPlan {
  std::vector<int> ranks;  // that are alike in this
  int pipeline_rank = 0;
  MemoryByKind peak;
  std::string moment;      // "backward of transformer.h.3"
  MemoryByKind resting;    // between two steps
  int64_t host_bytes = 0;  // offloaded: at most, beside the peak
  /// In the host's memory too, from the first checkpoint on: the copy that it
  /// is written from (StateSnapshot), of what this rank writes of its state.
  int64_t snapshot_bytes = 0;
  std::vector<PlannedCalls> calls;  // of a step
};

struct MemoryPlan {
  std::vector<RankPlan> ranks;  // by pipeline rank
  std::vector<std::string> notes;

  /// The rank that needs most.
  const RankPlan& largest() const;
};

/// Throws ConfigError as plan_recompute does.
MemoryPlan plan_memory(const MemoryModel& model, const Job& job);

/// What each layer keeps, and computes again, in each of the three ways: what
/// the trainer and the plan choose by. Of all layers but the loss.
std::vector<RecomputeCost> recompute_costs(const MemoryModel& model);

/// Whether gathered parameters stay until the step's end: [shard] gather, where
/// "auto" keeps them in a pipeline whose ranks fit memory.limit_bytes so.
bool gathers_once(const MemoryModel& model, const Job& job);

/// One change of the configuration, and what it does.
struct Advice {
  std::string setting;     // "memory.recompute = \"selective\""
  int64_t peak_bytes = 0;  // of the largest rank then
  int64_t saves_bytes = 0;
};

/// The single changes that make the largest rank's peak smaller, the best
/// first: for who runs out of memory.
std::vector<Advice> advise(const MemoryModel& model, const Job& job);

/// For a job whose plan is above `limit_bytes`: what does not fit, of which
/// kind it is, and what would help by how much; a few lines. Empty when it
/// fits.
std::string
explain_limit(const MemoryModel& model, const Job& job, int64_t limit_bytes);

/// For a job that offloads: what these ranks, all of one host, need of its
/// memory, the copies for checkpoints among it, when that is more than
/// `available_bytes`; with what can be done. Empty when it is enough, and when
/// nothing is offloaded.
std::string explain_host_memory(
    const MemoryModel& model, const Job& job, const std::vector<int>& ranks,
    int64_t available_bytes);

/// For a rank that ran out of memory: which kind it is, what the plan said, and
/// what would help by how much.
///
///   held         when more was not there
///   limit_bytes  of the rank; 0: not known
std::string explain_shortage(
    const MemoryModel& model, const Job& job, int pipeline_rank,
    const MemoryByKind& held, int64_t limit_bytes);

}  // namespace echelon
