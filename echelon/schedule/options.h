// The kinds of schedule, and how to ask for one: by numbers, or in a
// configuration.
//
// Throughout, p is the number of pipeline ranks, m of microbatches and v of
// stages that each rank holds. F, B, I and W are the times of a forward, a
// whole backward, and a backward's gradients of inputs and of weights.
//
// GPipe: all forwards, then all backwards.
//
//   rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
//   rank 1  .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
//
// Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks
// using Pipeline Parallelism", 2019, arXiv:1811.06965.
//
// One stage a rank, any p and m. When all stages cost the same, the bubble is
// (p-1)/(m+p-1) of the step. Every stage stores all m microbatches. The paper
// runs the backwards from the last microbatch to the first. Here they run from
// the first, as in torch.distributed.pipelining; the bubble and the memory are
// the same.
//
// 1F1B: after a warmup each stage alternates one forward and one backward.
// With p = 2, and B twice as long as F:
//
//   rank 0  F0 F1 .  .  B0 F2 .  B1 F3 .  B2 .  .  B3
//   rank 1  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3 .
//
// Source: "PipeDream-Flush" in Narayanan et al., "Memory-Efficient
// Pipeline-Parallel DNN Training", 2020, arXiv:2006.09503, section 3; and
// Narayanan et al., 2021, arXiv:2104.04473, section 2.2.1.
//
// One stage a rank, any p and m. Stage s runs p-1-s forwards before its first
// pair. The bubble is that of GPipe, (p-1)/(m+p-1), but stage s stores at most
// min(m, p-s) microbatches, however many there are.
//
// Interleaved 1F1B: each rank holds v stages, so the bubble is v times
// smaller.
//
// Source: Narayanan et al., "Efficient Large-Scale Language Model Training on
// GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473, section 2.2.2.
//
// Rank r holds the stages r, r + p, … Microbatches go in rounds of n: a rank
// runs a round's forwards on its first stage, then on its second, …, and its
// backwards from the last stage to the first. It runs (v-1)*n + 2(p-1-r)
// forwards of warmup, then pairs of one forward and one backward.
//
// The paper takes n = p and needs m to be a multiple of p. Here the m
// microbatches make max(1, m/p) rounds as even as can be, the longer ones
// first, so any m is defined. (torch.distributed.pipelining does the same
// where the rounds come out even.) v = 1 is 1F1B.
//
// When all stages cost the same and m >= p, the bubble is (p-1)/(v*m+p-1).
// Rank r stores at most min(v*m, (v-1)*n + 2(p-1-r) + 1) activations of its
// stages, each 1/v as large as those of a schedule with one stage a rank.
//
// Looped breadth-first: GPipe with v stages a rank, stage after stage.
//
// Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022,
// arXiv:2211.05953.
//
// Rank r holds the stages r, r + p, … It runs all forwards of its first stage,
// then of its second, …; then all backwards of its last stage, … A stage's
// parameters are thus needed for one stretch of forwards and one of backwards,
// which makes it cheap to shard them. v = 1 is GPipe.
//
// Any p and m. When all stages cost the same, the bubble is
// 1 - v*m / ((v-1)*max(m,p) + m + p - 1), which is (p-1)/(v*m+p-1) from m = p
// on. Every stage stores all m microbatches.
//
// ZB-H1 and ZB-H2: weight gradients are deferred and fill what would be
// bubble.
//
// Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
// arXiv:2401.10241, section 2 (handcrafted schedules).
//
// A backward is split into I, which the previous stage waits for, and W, which
// nobody waits for. Both schedules are 1F1B in F and I. Rank r defers its W by
// a number of microbatches that grows with r, and so runs them when it would
// wait.
//
//            warmup     W later by    stored, most    bubble
//   zb-h1    p-1-r      r             p               (p-1)(F+I-W)
//   zb-h2    2(p-1-r)   2r            2p-1            (p-1)(F+I-2W)
//
// The table holds for m >= p (zb-h1) and m >= 2p-1 (zb-h2), with W no longer
// than F and I; a negative bracket counts as 0. "Stored" are microbatches
// between their F and their W, on every rank, never more than m. The bubble is
// the paper's: the time from a rank's first action to its last, less the time
// that it computes. ZB-H2 has none when F = I = W, but its ranks start and end
// one after the other: it gains only when a rank begins the next step without
// waiting for the others.
//
// One stage a rank, any p and m.
//
// ZB-V: zero bubble in the memory of 1F1B, with two stages a rank in a V.
//
// Source: Qi et al., arXiv:2401.10241, section 6, and Qi et al., "Pipeline
// Parallelism with Controllable Memory", 2024, arXiv:2405.15362.
//
// Rank r holds the stages r (going down the V) and 2p-1-r (coming up). The
// rank that starts a microbatch also ends it, so its first gradients come
// early and its memory is free again early. Backwards are split into I and W
// as in ZB-H1.
//
// Exactly 2 stages a rank, any p and m (fewer than 2p-1 microbatches run the
// schedule of 2p-1 without the surplus). Every rank stores at most 2p
// activations of its stages, each half as large as with one stage a rank: as
// much as rank 0 of 1F1B, and the same on all ranks. When F = I = W and
// m >= 2p-1, the ranks idle only for the p-1 forwards in which the pipeline
// fills: rank r for r of them before its first action, and for p-1-r after its
// last.
//
// DualPipeV: a V of two stages a rank in which forwards meet backwards, so
// that the transfers of one overlap with the computation of the other.
//
// Source: DualPipe in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
// arXiv:2412.19437, section 3.2.1, halved to a V.
//
// Rank r holds the stages r and 2p-1-r. In the middle each forward of one
// stage is followed by a whole backward of the other. These pairs, a forward
// and a backward of different microbatches, overlap. Only at the ends, where a
// rank would wait, backwards are split into I and W.
//
// Exactly 2 stages a rank, and at least 2p microbatches. Every rank stores at
// most 2p+1 activations of its stages, each half as large as with one stage a
// rank. When F = I = W, and no pair gains from its overlap, every rank is idle
// for p-1 of these times in all.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/schedule/schedule.h"

namespace echelon {

namespace config {
class Section;
}

enum class ScheduleKind : uint8_t {
  gpipe,
  one_f_one_b,
  interleaved,
  breadth_first,
  zb_h1,
  zb_h2,
  zb_v,
  dualpipev,
};

inline constexpr std::array<ScheduleKind, 8> kScheduleKinds = {
    ScheduleKind::gpipe,       ScheduleKind::one_f_one_b,
    ScheduleKind::interleaved, ScheduleKind::breadth_first,
    ScheduleKind::zb_h1,       ScheduleKind::zb_h2,
    ScheduleKind::zb_v,        ScheduleKind::dualpipev};

/// Its name in a configuration: "1f1b", "zb-h1", …
std::string to_string(ScheduleKind kind);
/// The names of kScheduleKinds.
const std::vector<std::string>& schedule_names();
/// Throws ConfigError for an unknown name; the message has the nearest one.
ScheduleKind schedule_kind(std::string_view name);

/// The number that stages_per_rank = 0 stands for.
int32_t stages_per_rank_of(ScheduleKind kind);
/// Whether it is defined for any number of stages a rank.
bool takes_any_stages(ScheduleKind kind);
/// Whether its stages go down the pipeline and up again.
bool is_v_shaped(ScheduleKind kind);
/// Whether all forwards come before the first backward.
bool forwards_first(ScheduleKind kind);
/// Whether it has backwards of inputs and of weights.
bool splits_backward(ScheduleKind kind);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::one_f_one_b;
  int32_t ranks = 1;         // p, the pipeline ranks: --stages
  int32_t microbatches = 1;  // m
  /// v, the stages that each rank holds: the model is partitioned into p * v
  /// stages. 0 takes the kind's own number: 2 for interleaved, breadth_first,
  /// zb-v and dualpipev, 1 for the others.
  int32_t stages_per_rank = 0;
};

/// The most cells, p * v * m, of a schedule that is generated.
inline constexpr int64_t kMaxScheduleCells = int64_t{1} << 25;

/// Generates the schedule, which check() (check.h) accepts. Throws ConfigError
/// for numbers for which the kind is not defined; the message names the nearest
/// valid ones.
Schedule make_schedule(const ScheduleOptions& options);

/// The keys of [layout] next to the degrees.
struct PipelineLayout {
  int64_t microbatches = 0;  // of a step; 0: 4 per pipeline rank, or fewer
                             // where the batch is known
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  int64_t stages_per_rank = 0;  // 0: what the schedule takes
  std::string schedule_file;    // CSV; replaces the three above
};

/// microbatches, schedule, stages_per_rank, schedule_file.
void bind(config::Section& section, PipelineLayout& options);  // [layout]

/// The schedule of `ranks` pipeline ranks, checked. Throws ConfigError as
/// make_schedule, read_schedule_csv and check do; also when a file is for
/// another number of ranks, or contradicts the numbers that are set.
Schedule make_schedule(const PipelineLayout& options, int64_t ranks);

}  // namespace echelon
