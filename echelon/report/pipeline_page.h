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
#include "echelon/timeline/timeline.h"

namespace echelon::report {

struct PipelinePicture {
  std::string id;  // unique in the page, letters, digits and '-'
  std::string title;
  std::vector<timeline::PipelineRow> rows;  // blocks name them by index
  std::vector<std::string> groups;          // their names; empty: no headings
  std::vector<timeline::PipelineBlock> blocks;
  std::string unit;  // of begin and end; empty: seconds. "forwards" counts
  /// These are set where `blocks` are only the first part of a schedule, and
  /// hold for all of it; else they are computed.
  std::optional<double> bubble;
  std::optional<double> makespan;
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
PlayerSteps player_steps(const std::vector<timeline::PipelineBlock>& blocks);

// --- Pages, and one typical step of a timeline ------------------------------

struct PipelinePage {
  std::string title;                      // "1f1b, 4 stages, 8 microbatches"
  std::string lead;                       // a paragraph under it; may be empty
  std::vector<PipelinePicture> pictures;  // one above the other, one axis
  std::vector<std::pair<std::string, std::string>> facts;  // shown below
};

/// A page under 500 KB.
std::string pipeline_page(const PipelinePage& page);

/// Its title is the picture's.
std::string pipeline_page(const PipelinePicture& picture);

/// A typical step of a timeline, and a sentence on the idle time in it.
struct StagePictures {
  std::string heading;                    // "The pipeline, step by step"
  std::string sentence;                   // what the pictures show
  std::vector<PipelinePicture> pictures;  // the timeline's own step is the last
  double idle = 0;                        // of that step
  std::optional<double> ideal_idle;
};

/// The ideal schedule above a measured step. The order of the measured blocks
/// gives it (ideal_blocks), scaled so that a row works as long as in the
/// measured step. Nothing when the timeline holds no actions
/// (pipeline_blocks.h).
std::optional<StagePictures>
pipeline_pictures(const timeline::Timeline& timeline, const std::string& id);

/// When each device of a rank worked. Nothing when no track is a device's.
std::optional<StagePictures>
placement_pictures(const timeline::Timeline& timeline, const std::string& id);

/// Whichever of the two the timeline has, if any.
std::optional<StagePictures>
stage_pictures(const timeline::Timeline& timeline, const std::string& id);

/// The pictures alone: the caller writes heading and sentence.
void draw_stage_pictures(Markup& page, const StagePictures& pictures);

}  // namespace echelon::report
