// The orders of a layout's axes that a search tries.
//
// An order matters by which ranks share a node. Communication grows dearer from
// dp (once a step, of what fsdp leaves) over fsdp (once a step or more, of
// whole layers) to tp, cp and ep (several times a layer and microbatch, hidden
// by nothing), so that these keep their places: outermost, inside it,
// innermost. A pipeline sends little, in every microbatch; it may be inside of
// the data-parallel axes (the usual order), between them, or outside, which
// leaves the nodes to them.
#pragma once

#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/layout/layout.h"

namespace echelon {

/// All that are tried, by number; the first is kAxes, in which each pipeline
/// lies as near together as may be.
const std::vector<AxisOrder>& axis_orders();

/// Those of `allowed` (numbers of axis_orders()) in which a step of `layout`
/// may take different times: one of several that differ in axes of degree 1
/// alone, or, on nodes that are all equal, in which each axis has as many ranks
/// within a node. On one node that is the first alone.
std::vector<int> orders_that_differ(
    const Layout& layout, const std::vector<int>& allowed,
    const Cluster& cluster);

}  // namespace echelon
