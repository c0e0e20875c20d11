// Every key of a configuration, from the binds themselves.
#pragma once

#include <string>

namespace echelon::cli {

/// doc/configuration.md.
std::string reference();

/// The same as a JSON list.
std::string reference_json_text();

}  // namespace echelon::cli
