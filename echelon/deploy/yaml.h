// Manifests as YAML, in the part of it that every reader takes alike: blocks,
// and strings between double quotes unless they can be nothing else.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon::deploy {

/// `value` as a document of YAML, without a line "---". Members keep their
/// order. Texts of several lines become literal blocks.
std::string to_yaml(const nlohmann::ordered_json& value);

}  // namespace echelon::deploy
