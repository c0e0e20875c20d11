// A run's state as lines of text.
#pragma once

#include <string>
#include <vector>

#include "echelon/cli/terminal.h"
#include "echelon/watch/run_view.h"

namespace echelon::cli {

/// The state of a run in at most `rows` lines, none wider than style.columns.
/// What files say is made plain (text/plain.h).
std::vector<std::string>
lines_of(const watch::RunView& view, const Style& style, size_t rows);

/// One line: "training  step 340/1000  loss 0.2931  5,120 samples/s  ETA 0:42".
std::string short_line(const watch::RunView& view);

/// Many runs, a line each, with a heading.
std::vector<std::string> lines_of(
    const std::vector<watch::RunView>& views, const Style& style, size_t rows);

}  // namespace echelon::cli
