// A pool as a page: who has what, who waits and why, and who had how much when.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon::pool {

/// One HTML file without network or scripts, below 500 KB for any past: of many
/// allocations those that are too short to see are left out. `answer`: the
/// daemon's to the request "page" (answers.cpp).
std::string to_html(const nlohmann::ordered_json& answer);

}  // namespace echelon::pool
