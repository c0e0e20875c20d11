// One step of all ranks, drawn with a lane for each; ranks that did the same at
// the same time, as those of a simulation, share one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/timeline/overlap.h"

namespace echelon::report {

struct Lane {
  std::vector<int32_t> ranks;  // ascending
  std::string name;            // ranks_text(ranks)
  timeline::StepActivity activity;
};

/// Adds `rank`, and those of its class, to `ranks`, which stay ascending.
/// `classes` has the class of each rank of a simulated layout; or is empty.
void add_ranks(
    std::vector<int32_t>& ranks, int32_t rank,
    const std::vector<int32_t>& classes);

/// "rank 3", "ranks 0–31", "rank 0 + 7" when they do not follow each other.
std::string ranks_text(const std::vector<int32_t>& ranks);

/// The lanes of one step: equal activities are one.
std::vector<Lane> lanes_of(
    const std::vector<timeline::StepActivity>& ranks,
    const std::vector<int32_t>& classes);

/// Beyond `max_bars`, bars become cells whose colours are as high as their
/// share of the cell's time: nothing is left out.
void draw_lanes(
    Markup& page, const std::string& id, const std::string& title,
    const std::vector<Lane>& lanes, size_t max_bars);
void draw_lanes_legend(Markup& page, const std::vector<Lane>& lanes);

}  // namespace echelon::report
