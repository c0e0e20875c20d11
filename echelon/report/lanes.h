// One step of all ranks as a picture: what each computed, what it sent.
//
// Each rank has a lane of computation and data wait, and below it a lane of
// communication, hatched where it is hidden behind computation and solid where
// it is exposed. The marks are the sets of step_activities (overlap.h).
#pragma once

#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/timeline/overlap.h"

namespace echelon {

struct LanesPicture {
  std::string id;                   // unique in the page
  std::string title;                // "Step 57, a typical one"
  std::string description;          // for those who do not see it
  std::vector<StepActivity> ranks;  // of one step, by rank
  /// More bars than this are drawn joined where the gaps are the smallest.
  size_t max_bars = 1200;
};

void draw_lanes(Markup& page, const LanesPicture& picture);

/// The pattern of overlapped communication; once in a page, before pictures.
void draw_lanes_pattern(Markup& page);

/// What the colours mean.
void draw_lanes_legend(Markup& page, const std::vector<StepActivity>& ranks);

}  // namespace echelon
