// The orders of a layout's axes that a search tries.
//
// An order decides which ranks share a node. Communication is cheapest along dp
// (once a step, of a shard), more expensive along fsdp (once a step or more, of
// full layers), and most expensive along tp, cp and ep (several times a layer
// and microbatch, and exposed). So these keep their places: outermost, inside
// it, and innermost. A pipeline sends little, but in every microbatch. It may
// be inside the data-parallel axes (the usual order), between them, or outside,
// where it leaves the nodes to them.
#pragma once

#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/layout/layout.h"

namespace echelon::planner {

/// All orders that are tried, by number. The first is kAxes: it places the
/// ranks of each pipeline as near to each other as possible.
const std::vector<AxisOrder>& axis_orders();

/// The numbers in `allowed` (of axis_orders()) with which a step of `layout`
/// may take different times. Of orders that differ only in axes of degree 1,
/// or, on equal nodes, that give each axis as many ranks within a node, only
/// one is kept. On one node only the first is kept.
std::vector<int> orders_that_differ(
    const Layout& layout, const std::vector<int>& allowed,
    const cluster::Cluster& cluster);

}  // namespace echelon::planner
