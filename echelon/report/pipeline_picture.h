// Pipeline, model and data parallelism as rows of numbered blocks, the picture
// that usually explains pipelines.
//
// Forwards are pale, backwards dark, backwards for inputs alone striped,
// backwards for weights alone dotted; idle time is hatched. A block shows its
// microbatch where it is wide enough. Several pictures, one above the other,
// share the axis of time, so that their lengths compare.
//
// With scripts on, a player (assets/pipeline.js) steps through it: t = 1, 2, 3
// … with a cursor in the pictures, while the microbatches move between boxes
// that are the rows. Without scripts there are no controls, and the pictures
// are complete.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon {

struct PipelinePicture {
  std::string id;  // unique in the page, letters, digits and '-'
  std::string title;
  std::string description;          // for those who do not see it; empty: made
  std::vector<PipelineRow> rows;    // blocks name them by index
  std::vector<std::string> groups;  // their names; empty: no headings
  std::vector<PipelineBlock> blocks;
  std::string unit;  // of begin and end; empty: seconds. "forwards" counts
  /// Of the whole, where `blocks` are only the first part of it; else computed.
  std::optional<double> bubble;
  std::optional<double> makespan;
  std::string note;                     // under the picture
  std::string measure_name = "bubble";  // what the idle share is called
  std::string player_name;  // in the choice of what to play: "the real step"
};

/// Beyond these, the first rows and the first stretch of time are drawn, and a
/// note says so; bubble and length are still those of all blocks given.
inline constexpr size_t kMaxPipelineRows = 64;
inline constexpr size_t kMaxPipelineBlocks = 1000;  // of a picture

/// Pictures one above the other with one axis, one player and one legend. Their
/// units are the same. The player shows `plays_first` first.
void draw_pipelines(
    Markup& page, const std::vector<PipelinePicture>& pictures,
    size_t plays_first = 0, size_t max_blocks = kMaxPipelineBlocks);

/// The moments at which a player stops, ascending. Evenly spaced where all
/// blocks fit a raster; else such that each block runs at one of them.
struct PlayerSteps {
  bool even = false;
  std::vector<double> moments;
};
PlayerSteps player_steps(const std::vector<PipelineBlock>& blocks);

}  // namespace echelon
