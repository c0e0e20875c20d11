// Degrees of the mesh axes from a configuration.
#pragma once

#include <string>
#include <vector>

#include "echelon/layout/layout.h"

namespace echelon {

namespace config {
class Section;
}

/// dp (dp_replicate), fsdp (dp_shard), tp, pp, cp, ep, each at least 1.
void bind(config::Section& section, Layout& layout);  // [layout]

/// The keys that bind() takes, both names of each.
const std::vector<std::string>& layout_keys();

}  // namespace echelon
