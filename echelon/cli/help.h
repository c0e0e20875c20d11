// What --help prints: examples first.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace echelon::cli {

/// Prints help our way, for `app` and the commands added to it later. A command
/// keeps its examples in its footer, one a line.
void set_help(CLI::App& app);

/// "echelon config show".
std::string full_name(const CLI::App& app);

/// True when `stream` (1, 2) is a terminal that wants colours: not NO_COLOR,
/// not TERM=dumb.
bool has_colours(int stream);

}  // namespace echelon::cli
