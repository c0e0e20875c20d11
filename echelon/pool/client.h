// Asks the daemon of a pool.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon::pool {

/// The folder of the pool: $ECHELON_POOL, else /var/lib/echelon/pool where that
/// exists or for root, else $XDG_STATE_HOME/echelon/pool, in ~/.local/state
/// where that is not set. Throws ConfigError without any of them.
std::filesystem::path default_folder();

/// The daemon's socket in that folder.
std::filesystem::path socket_of(const std::filesystem::path& folder);

/// One request and its answer. Throws ConfigError when no daemon runs there,
/// it is of another version, or it refuses; Error when it does not answer. A
/// submission that has a key may be sent again.
nlohmann::ordered_json
ask_pool(const std::filesystem::path& folder, nlohmann::ordered_json request);

/// A request as a line of JSON, and the answer as one. Throws as ask_pool(),
/// but takes a refusal for an answer.
std::string
forward_to_pool(const std::filesystem::path& folder, const std::string& line);

/// The answer that a line is. Throws what the daemon refused with.
nlohmann::ordered_json answer_of(const std::string& line);

}  // namespace echelon::pool
