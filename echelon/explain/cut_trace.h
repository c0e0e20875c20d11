// Timelines whose file was cut off: a full disk, a copy that broke.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/timeline/timeline.h"

namespace echelon {

struct CutTrace {
  Timeline timeline;
  int32_t cut_rank =
      -1;  // whose spans broke off, and were left out; -1: nothing
};

/// As parse_chrome_trace; of a text that breaks off, the events before. A file
/// has one rank after another: the rank in whose events it breaks off is left
/// out, or, when it is the only one, its last step. Throws DataError when no
/// event is whole.
CutTrace parse_cut_trace(const std::string& text, const std::string& place);

}  // namespace echelon
