// Which collectives a run made, for what, and what they cost.
//
// A rank of a step that communicates is compared with its own computing
// (overlap.h): the part of a call during which something computed was hidden,
// and cost no time.
#pragma once

#include <string>
#include <vector>

#include "echelon/report/markup.h"
#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// The calls of one label in one pass: means per step, over the typical steps
/// and the ranks that make them.
struct CollectiveCost {
  std::string axis;       // of the mesh: "tp"
  std::string operation;  // "all_reduce"
  std::string label;      // "transformer.h.0.attn.c_attn input gradient"
  /// In which it began: "forward", "backward", "optimizer"; else empty.
  std::string pass;
  double calls = 0;
  double bytes = 0;           // of this rank's inputs
  double seconds = 0;         // from begin to end, summed over the calls
  double hidden_seconds = 0;  // of `seconds`, while something computed
};

/// Sorted by axis, label, operation and pass. Spans without an axis are no
/// calls (they are waits, or of a file of an older version).
std::vector<CollectiveCost>
collective_costs(const Timeline& timeline, const Diagnosis& diagnosis);

/// The same with labels that differ in numbers alone put together: "bucket 0"
/// and "bucket 3" are "bucket 0–3"; the longest first. A pipeline's labels
/// ("0F3") say what is sent.
std::vector<CollectiveCost> put_together(std::vector<CollectiveCost> costs);

/// A table of all of them by axis; nothing without any.
void draw_collectives(
    Markup& page, const Timeline& timeline, const Diagnosis& diagnosis);

}  // namespace echelon
