// Which rank computes which microbatch, and when: the blocks of a pipeline's
// picture.
//
// Blocks come from three places: from the spans of a real step, from a replay
// that keeps the order of each row but gives blocks other lengths, and from a
// schedule (its owner makes them).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "echelon/timeline/timeline.h"

namespace echelon::timeline {

enum class BlockKind : uint8_t {
  forward,          // F
  backward,         // B  gradients of inputs and of weights
  backward_input,   // I  gradients of inputs alone
  backward_weight,  // W  gradients of weights alone
  transfer,         // between devices; does not count as work
};

/// What one row did from begin to end. Time that no block covers is idle.
struct PipelineBlock {
  int32_t row = 0;
  BlockKind kind = BlockKind::forward;
  int32_t stage = -1;       // of the model, over all rows; -1: not known
  int32_t microbatch = -1;  // the number in the block; -1: none
  int32_t chunk = 0;  // index among the stages of the row, shown as a shade
  double begin = 0;   // in the picture's unit
  double end = 0;
  std::string name;  // shown while pointed at; empty: from the fields above
};

/// One line of blocks: a rank or a device.
struct PipelineRow {
  std::string name;   // "rank 0"
  int32_t group = 0;  // index of the pipeline; rows of a group are together
  int32_t rank = -1;  // -1: the row is no rank's
};

struct PipelineRows {
  std::vector<PipelineRow> rows;
  std::vector<PipelineBlock> blocks;
};

/// 'F', 'B', 'I', 'W' or 'T'.
char letter(BlockKind kind);

/// Stage, kind and microbatch of a span named "0F3"; nothing for other names.
std::optional<PipelineBlock> block_of_name(const std::string& name);

/// The step to draw: complete, of median length, and not the first recorded one
/// when there are others. Nothing when no span is an action.
std::optional<int64_t> typical_pipeline_step(const Timeline& timeline);

/// The actions of one step in seconds since the first began; rows are ranks,
/// those of a replica together, in the order of their stages.
///
/// An action is a span of kind forward or backward on the track "compute",
/// named as above; waits for other stages recorded inside of it (kind
/// communication, "wait 0F3") are left out of it; those for other axes are part
/// of it. Spans that end before they begin are left out. Spans of kind
/// communication on the track "comm" become transfers, clipped at the step's
/// ends, unless they are of another axis than "pp"; of a message that sender
/// and receiver recorded, only that of the receiver.
PipelineRows pipeline_rows(const Timeline& timeline, int64_t step);

/// A pipeline posts its receives ahead of time, so the span of a receive begins
/// long before anything moves. Moves that begin to the end of the action whose
/// result the message holds ("send_recv 0F3", on a rank without stage 0).
void trim_receives(Timeline& timeline);

/// Steps and rows of model parallelism: rows are the tracks "device 0", "device
/// 1" … of each rank, blocks their spans of kind forward and backward.
std::optional<int64_t> typical_placement_step(const Timeline& timeline);
PipelineRows placement_rows(const Timeline& timeline, int64_t step);

/// From the first begin to the last end of any work, and that first begin.
double makespan(const std::vector<PipelineBlock>& blocks);
double first_begin(const std::vector<PipelineBlock>& blocks);

/// The time in which each row works, overlaps counted once.
std::vector<double>
busy_times(const std::vector<PipelineBlock>& blocks, size_t num_rows);

/// Idle time over rows times makespan, in [0, 1]; 0 without blocks.
double
bubble_fraction(const std::vector<PipelineBlock>& blocks, size_t num_rows);

/// Runs the blocks of each row in the order of their begins, each as soon as
/// its inputs are ready. A forward needs the forward of the stage before; a
/// backward needs the backward of the stage after and its own forward; a
/// backward for weights needs that for inputs. Transfers take no time and are
/// left out. An input that none of the blocks gives counts as ready. Nothing
/// when blocks wait for each other.
std::optional<std::vector<PipelineBlock>> replayed(
    const PipelineRows& measured,
    const std::function<double(const PipelineBlock&)>& duration);

/// Each pass as one block that is as long as its pieces between waits together;
/// transfers are left out. The blocks are in the order in which they begin when
/// those of `measured` are.
PipelineRows whole_passes(const PipelineRows& measured);

/// The ideal for the order of `measured`: a forward takes 1, a backward 2, half
/// a backward 1.
std::optional<std::vector<PipelineBlock>>
ideal_blocks(const PipelineRows& measured);

}  // namespace echelon::timeline
