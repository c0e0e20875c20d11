// The known name that a mistyped one probably meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon::config {

/// The candidate nearest to `word`: few edits away, an abbreviation ("lr" of
/// "learning_rate") or a longer form ("batch_size" of "batch"). Letter case
/// and - against _ do not count. Empty when none is near.
std::string
nearest(std::string_view word, const std::vector<std::string>& candidates);

/// `; did you mean "x"?`, or nothing when no candidate is near.
std::string
did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace echelon::config
