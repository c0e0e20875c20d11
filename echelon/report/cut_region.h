// A tensor-parallel region as a row of the report: X, the matrices, Z, and the
// collectives between them; what tensor_section.h draws layers from.
#pragma once

#include <string>
#include <vector>

#include "echelon/report/collectives.h"
#include "echelon/report/markup.h"
#include "echelon/report/tensor_cut.h"

namespace echelon::detail {

/// What a region is drawn with, beside itself.
struct RegionContext {
  const TensorCut& cut;
  const CutBlock& block;
  std::string id;                     // unique in the page
  const CutRegion* before = nullptr;  // in the order of computation
  const CutRegion* after = nullptr;
  bool input_is_data = false;  // which has no gradient
  bool is_last = false;        // its output goes into the loss
  /// Calls of the block's layers, with labels within a layer: "attn.c_attn
  /// sum".
  const std::vector<CollectiveCost>& costs;
};

/// Costs are those of one layer and step.
void draw_region(
    Markup& page, const CutRegion& region, const RegionContext& context);

}  // namespace echelon::detail
