// How wide the terminal is that the output goes to.
#pragma once

#include <cstddef>

namespace echelon::cli {

/// Columns of standard output, `otherwise` where it is no terminal.
size_t terminal_columns(size_t otherwise);

}  // namespace echelon::cli
