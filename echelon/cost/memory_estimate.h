// Memory of a rank by kind, from formulas alone: what layers keep from forward
// to backward and take while they compute, weights, gradients and optimizer
// state, and the sum of all.
// Sources: Rajbhandari et al., 2020, arXiv:1910.02054, section 5 (stages of
// ZeRO); Korthikanti et al., 2022, arXiv:2205.05198, section 4 (activations),
// but counted by tensor, so that it also holds for shared keys, gated and
// latent layers, experts and fused kernels.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "echelon/cluster/device.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/model_shape.h"
#include "echelon/cost/strategy.h"
#include "echelon/timeline/memory_kind.h"

namespace echelon::cost {

/// Bytes of one microbatch of one layer on one rank.
struct ActivationBytes {
  double kept = 0;     // from forward to backward, after recompute
  double working = 0;  // in addition during backward, with what is recomputed
  double output = 0;   // sent to the next stage
};

/// Bytes of an element as layers compute it: 8, 4 or 2.
double element_bytes(cluster::Precision precision);

/// Bytes of a gradient's element as ranks sum it.
double reduced_bytes(const Strategy& strategy, const Framework& framework);

/// Tokens of one microbatch on a rank, before sequence parallelism.
double rank_tokens(const ModelShape& model, const Strategy& strategy);

ActivationBytes block_bytes(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework, bool experts, Recompute recompute);
/// Last norm, head and loss.
ActivationBytes head_bytes(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework);
ActivationBytes counted_bytes(
    const CountedLayer& layer, const Strategy& strategy, Recompute recompute);

/// For each pipeline stage, the bytes that its layers keep for a microbatch,
/// the most that one of them or the loss takes in addition, and the bytes that
/// go to the next stage.
std::vector<ActivationBytes> stage_activations(
    const ModelShape& model, const Strategy& strategy,
    const Framework& framework);

/// Elements on one rank of tensor and expert parallelism, before ZeRO shards
/// them.
struct RankParameters {
  double dense = 0;
  double experts = 0;  // not replicated along ep
  /// The largest group of parameters that is unsharded at a time.
  double largest_unit = 0;
  double embedding_and_head = 0;

  double total() const { return dense + experts; }
  bool operator==(const RankParameters&) const = default;
};

/// The parameters of each pipeline stage. Throws ConfigError when there are
/// fewer layers than stages.
std::vector<RankParameters>
stage_parameters(const ModelShape& model, const Strategy& strategy);

/// Values that the optimizer keeps for an element: 2 for adam and adamw, 1 for
/// sgd with momentum.
double optimizer_states(const Strategy& strategy);

/// The axes along which ranks share parameters. Ranks of context parallelism
/// have the same parameters; in some frameworks they shard them
/// (FrameworkMemory::shards_over_cp).
struct SharingAxes {
  std::span<const Axis> shards;  // ranks that ZeRO shards over; none in stage 0
  std::span<const Axis> copies;  // other ranks that sum the gradients
};

/// The axes that share state: of dense parameters, or of experts, which are not
/// replicated along ep.
SharingAxes sharing_axes(
    const Strategy& strategy, const Framework& framework, bool experts);

/// Whether gradients are reduced after each microbatch, not once a step.
bool gradients_are_reduced_often(
    const Strategy& strategy, const Framework& framework);

/// Number of ranks that ZeRO shards one copy over, of dense parameters or of
/// experts.
double
zero_shards(const Strategy& strategy, const Framework& framework, bool experts);

/// Weights, gradients and optimizer state of a rank with these parameters, over
/// all of its stages. Unsharded parameters are MemoryKind::unsharded; offloaded
/// state is in `host_bytes`.
struct StateBytes {
  timeline::MemoryByKind device;
  double host_bytes = 0;
};
StateBytes state_bytes(
    const RankParameters& parameters, const Strategy& strategy,
    const Framework& framework);

struct PipelineShape {
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  int64_t ranks = 1;            // p
  int64_t stages_per_rank = 1;  // v
  int64_t microbatches = 1;     // m
};

/// The stages of a rank, first to last: interleaved, or down and up a V.
std::vector<int64_t> stages_of_rank(const PipelineShape& shape, int64_t rank);

/// The number of microbatches that wait for their backward, by formula. It is
/// what schedule/memory.h counts, but needs no schedule. The values are by
/// stages_of_rank, at the rank's fullest moment. They sum to
/// stored_activations().ranks; for zb-v and dualpipev with fewer than 2p
/// microbatches, to at most two more than that.
std::vector<double>
stored_microbatches(const PipelineShape& shape, int64_t rank);

struct MemoryEstimate {
  std::vector<timeline::MemoryByKind>
      ranks;  // by pipeline rank, at the fullest moment
  /// Bytes that each rank needs in addition: context, libraries, fragments.
  double reserved_bytes = 0;
  double host_bytes = 0;  // of each rank: offloaded
  /// The bytes that a job may use of each pipeline rank's device; empty: not
  /// known.
  std::vector<double> limits;

  double limit(size_t rank) const;  // 0: not known
  double bytes(size_t rank) const;  // with reserved_bytes
  /// Bytes of the fullest rank, with reserved_bytes.
  double peak_bytes() const;
  /// The rank with the largest share of its limit.
  int fullest() const;
  /// The bytes of fullest() over its limit; its bytes where limits are not
  /// known.
  double fullness() const;

 private:
  double share(size_t rank) const;
};

MemoryEstimate
estimate_memory(const ModelShape& model, const Strategy& strategy);

/// A quick lower bound: weights, gradients and optimizer state of the fullest
/// rank. A strategy whose bound exceeds the device memory cannot fit.
double least_bytes(const ModelShape& model, const Strategy& strategy);

/// Bytes that a job may use of a device.
double usable_bytes(const cluster::Device& device);

}  // namespace echelon::cost
