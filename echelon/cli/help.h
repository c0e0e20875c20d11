// The help of a command: on the terminal, and as a manual page.
#pragma once

#include <string>
#include <vector>

#include "echelon/cli/terminal.h"

namespace CLI {
class App;
}

namespace echelon::cli {

/// "echelon config show"
std::string full_name(const CLI::App& app);

std::vector<const CLI::App*> subcommands(const CLI::App& app);

/// Examples first, then the usage, the commands by group, and the options. At
/// most 80 columns, fewer on a narrow terminal.
std::string help_text(const CLI::App& app, const Style& style);

/// The same as a manual page of section 1, in the macros of man(7).
std::string manual_page(const CLI::App& app);

/// Writes the manual pages of the whole tree into a folder, which is made:
/// echelon.1, echelon-train.1, echelon-config-show.1 … Returns how many there
/// are. Throws ConfigError when they cannot be written.
size_t write_manual(const CLI::App& root, const std::string& folder);

}  // namespace echelon::cli
