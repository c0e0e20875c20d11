// The memory that each rank of a job holds at its fullest moment, by kind, and
// the traffic of a step, found by walking a step's events without running it.
//
//   const MemoryModel model = count_memory(job, source);    // count_job.h
//   const MemoryPlan plan = plan_memory(model, job);
//   plan.ranks[0].peak[MemoryKind::activations];
//
// Free of LibTorch. Numbers are bytes of tensors, without what libraries
// allocate themselves and what an allocator keeps unused. Sources: Rajbhandari
// et al., "ZeRO", 2020, arXiv:1910.02054 (states); Korthikanti et al., 2022,
// arXiv:2205.05198 (activations).
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

namespace echelon::memory_plan {

/// How a layer uses memory in one microbatch. LayerCost explains the fields.
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
  bool expert = false;  // the ranks of ep have others
};

/// One layer on a rank.
struct PlannedLayer {
  std::string name;
  std::vector<PlannedParameter> parameters;  // without those tied to an earlier
                                             // layer's
  std::vector<size_t> tied_to;               // layers whose parameters it uses
  int64_t buffer_bytes = 0;
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;
  std::array<double, 3> again_flops{};      // that backward recomputes
  std::array<LayerUse, 3> use;              // recompute: none, selective, all
  std::vector<PlannedCalls> forward_calls;  // of one microbatch
  std::array<std::vector<PlannedCalls>, 3> backward_calls;
};

/// A parameter that several stages use. Each has a copy, and their gradients
/// are summed when a step's backwards have ended.
struct PlannedTie {
  std::vector<size_t> layers;  // the first of each stage with a copy
  int64_t numel = 0;
  bool trains = true;
};

/// The counts of a model and a batch, which do not depend on settings of
/// memory. They are those of the first tensor-parallel rank; no other has more.
struct MemoryModel {
  std::vector<PlannedLayer> layers;  // the last one is the loss
  std::vector<size_t> boundaries;    // of stages; the loss is in the last
  std::vector<PlannedTie> ties;      // across stages
  Schedule schedule;                 // of one rank without a pipeline
  int64_t master_bytes = 4;          // of an element of a parameter
  int64_t compute_bytes = 4;         // as layers see it
  int64_t num_parameters = 0;        // of the whole model
  /// The ranks compute in the host's memory: offloading saves nothing there.
  bool host_is_device = false;
  int64_t batch_bytes = 0;         // inputs and targets of a step, on this rank
  std::vector<std::string> notes;  // what the numbers leave open
};

struct RankPlan {
  std::vector<int> ranks;  // that have this plan
  int pipeline_rank = 0;
  timeline::MemoryByKind peak;
  std::string moment;              // "backward of transformer.h.3"
  timeline::MemoryByKind resting;  // between two steps
  int64_t host_bytes = 0;          // offloaded, at most; not part of the peak
  /// In the host's memory too, from the first checkpoint on: the copy of the
  /// state that this rank writes (StateSnapshot).
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

/// The sizes of the NCCL communicators of a job on GPUs, largest first, for the
/// rank that has most: one for each set of ranks with a group (World,
/// MeshGroups), one for the messages of the pipeline, and one of two ranks for
/// each peer there.
std::vector<int64_t>
communicator_sizes(const MemoryModel& model, const Layout& layout);

/// What each layer but the loss keeps and recomputes in each of the three ways.
/// The trainer and the plan choose by it.
std::vector<cost::RecomputeCost> recompute_costs(const MemoryModel& model);

/// Whether parameters stay unsharded until the step's end: [shard] gather,
/// where "auto" keeps them in a pipeline whose ranks then fit
/// memory.limit_bytes.
bool unshards_once(const MemoryModel& model, const Job& job);

/// One change of the configuration, and what it does.
struct Advice {
  std::string setting;     // "memory.recompute = \"selective\""
  int64_t peak_bytes = 0;  // of the largest rank then
  int64_t saves_bytes = 0;
};

/// The single changes that make the largest rank's peak smaller, the best
/// first.
std::vector<Advice> advise(const MemoryModel& model, const Job& job);

/// How many changes are shown.
inline constexpr size_t kMostAdvice = 6;

/// For a job whose plan is above `limit_bytes`: what does not fit, which kind
/// of memory that is, and how much the best changes would help, a line each.
/// Empty when it fits.
std::string explain_limit(
    const MemoryModel& model, const Job& job, int64_t limit_bytes,
    size_t most_advice = kMostAdvice);

/// For a job that offloads, or computes in the host's memory: the host memory
/// that these ranks, all of one host, need, including copies for checkpoints,
/// and what can be done if that is more than `available_bytes`. Empty when it
/// is not, or when nothing is there.
std::string explain_host_memory(
    const MemoryModel& model, const Job& job, const std::vector<int>& ranks,
    int64_t available_bytes);

/// The ranks of a job.
std::vector<int> all_ranks(const Layout& layout);

/// For a rank that ran out of memory: which kind of memory it is, what the plan
/// said, and how much each change would help.
///
///   held         when an allocation failed
///   limit_bytes  of the rank; 0: not known
std::string explain_shortage(
    const MemoryModel& model, const Job& job, int pipeline_rank,
    const timeline::MemoryByKind& held, int64_t limit_bytes);

struct PlanTextOptions {
  int64_t host_bytes = 0;  // of the host of all ranks; 0: not known
  bool colours = false;    // of the bars; without them they are letters
  size_t columns = 80;     // of the terminal
};

/// Peaks by kind, with a line and a bar for ranks that are alike; then a step's
/// collectives; then whether they fit memory.limit_bytes, and what would help.
std::string to_text(
    const MemoryPlan& plan, const MemoryModel& model, const Job& job,
    const PlanTextOptions& options = {});

/// One object: {"parameters": …, "ranks": [{"ranks": [0, 1], "peak_bytes": …,
/// "bytes": {"parameters": …}, "moment": …, "collectives": […]}], "advice":
/// […]}.
std::string
to_json(const MemoryPlan& plan, const MemoryModel& model, const Job& job);

}  // namespace echelon::memory_plan
