// Pages of pipeline pictures, and the part of a report that shows one typical
// step of a model partitioned by its layers.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/report/pipeline_picture.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

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

/// The ideal schedule above a measured step. Without `ideal`, the order of the
/// measured blocks gives it (ideal_blocks). Its times may be in any unit: they
/// are scaled so that a row works as long as in the measured step. Nothing when
/// the timeline holds no actions (pipeline_blocks.h).
std::optional<StagePictures> pipeline_pictures(
    const Timeline& timeline, const std::optional<PipelineRows>& ideal,
    const std::string& id);

/// When each device of a rank worked. Nothing when no track is a device's.
std::optional<StagePictures>
placement_pictures(const Timeline& timeline, const std::string& id);

/// Whichever of the two the timeline has, if any.
std::optional<StagePictures> stage_pictures(
    const Timeline& timeline, const std::optional<PipelineRows>& ideal,
    const std::string& id);

/// The pictures alone: the caller writes heading and sentence.
void draw_stage_pictures(Markup& page, const StagePictures& pictures);

}  // namespace echelon
