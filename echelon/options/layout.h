// The degrees and the order of the mesh axes, from a configuration.
#pragma once

#include <string>
#include <vector>

#include "echelon/layout/layout.h"

namespace echelon {

namespace config {
class Section;
}

/// dp (dp_replicate), fsdp (dp_shard), tp, pp, cp, ep, each at least 1; order.
void bind(config::Section& section, Layout& layout);  // [layout]

/// The keys of the degrees, both names of each.
const std::vector<std::string>& degree_keys();

/// The order as a configuration writes it: ["dp", "fsdp", …].
std::vector<std::string> order_names(const AxisOrder& order);

}  // namespace echelon
