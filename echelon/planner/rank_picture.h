// Nodes and their devices, as pictures of a plan's page: which ranks share the
// work of an axis.
#pragma once

#include "echelon/planner/plan.h"
#include "echelon/report/markup.h"

namespace echelon::planner {

/// A picture for each axis with several ranks, innermost first: the devices of
/// the first nodes, with the group of rank 0 in colour. Nothing for one rank.
void draw_rank_groups(
    report::Markup& page, const cluster::Cluster& cluster, const Plan& plan);

}  // namespace echelon::planner
