// What the report says of a model that is cut by its layers: the pictures of
// one typical step, and a sentence on the idle time in them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/report/pipeline_picture.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

struct StagePictures {
  std::string heading;                    // "The pipeline, step by step"
  std::string sentence;                   // what the pictures show
  std::vector<PipelinePicture> pictures;  // the timeline's own step is the last
  double idle = 0;                        // of that step
  std::optional<double> ideal_idle;
};

/// The ideal schedule above a measured step. Without `ideal`, it is what the
/// order of the measured blocks gives (ideal_blocks). Its times may be in any
/// unit: they are scaled so that a row works as long as in the measured step.
/// Nothing when the timeline holds no actions (pipeline_blocks.h).
std::optional<StagePictures> pipeline_pictures(
    const Timeline& timeline, const std::optional<PipelineRows>& ideal,
    const std::string& id);

/// Which device of a rank worked when. Nothing when no track is a device's.
std::optional<StagePictures>
placement_pictures(const Timeline& timeline, const std::string& id);

/// The one of both that the timeline has, if any.
std::optional<StagePictures> stage_pictures(
    const Timeline& timeline, const std::optional<PipelineRows>& ideal,
    const std::string& id);

/// The pictures; heading and sentence are the caller's to write.
void draw_stage_pictures(Markup& page, const StagePictures& pictures);

}  // namespace echelon
