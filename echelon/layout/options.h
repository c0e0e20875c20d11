// Degrees of the mesh axes from a configuration.
#pragma once

#include "echelon/layout/layout.h"

namespace echelon {

namespace config {
class Section;
}

/// dp (dp_replicate), fsdp (dp_shard), tp, pp, cp, ep, each at least 1.
void bind(config::Section& section, Layout& layout);  // [layout]

}  // namespace echelon
