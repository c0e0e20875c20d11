// Which collectives a run made, for what, and what they cost.
//
// A call is compared with the computation of its own rank (overlap.h): the part
// of the call during which the rank computed is hidden, and cost no time.
#pragma once

#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon::report {

/// The calls of one label in one pass: means per step, over the typical steps
/// and the ranks that make them.
struct CollectiveCost {
  std::string axis;       // of the mesh: "tp"
  std::string operation;  // "all_reduce"
  std::string label;      // "transformer.h.0.attn.c_attn input gradient"
  /// The pass in which it began: "forward", "backward", "optimizer", or empty.
  std::string pass;
  double calls = 0;
  double bytes = 0;           // of this rank's inputs
  double seconds = 0;         // from begin to end, summed over the calls
  double hidden_seconds = 0;  // of `seconds`, while something computed
  double share_of_ranks = 1;  // of those with calls on the axis, who make it
};

/// Sorted by axis, label, operation and pass. Spans without an axis are not
/// calls: they are waits, or an older version wrote them.
std::vector<CollectiveCost> collective_costs(
    const timeline::Timeline& timeline, const timeline::Diagnosis& diagnosis);

/// Merges calls whose labels differ only in numbers: "bucket 0" and "bucket 3"
/// become "bucket 0–3"; the longest first. Labels of a pipeline ("0F3") become
/// what is sent.
std::vector<CollectiveCost> put_together(std::vector<CollectiveCost> costs);

/// A table of all calls by axis; nothing without any.
void draw_collectives(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis);

}  // namespace echelon::report
