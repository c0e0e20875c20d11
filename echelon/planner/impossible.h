// Why a job has no strategy at all, whatever the memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/planner/search_space.h"

namespace echelon {

/// The smallest set of constraints that cannot go together, or the batch that
/// no layout divides with the nearest ones that one does. For a message.
std::string explain_impossible(const SearchJob& job);

/// The same as a clause: "the batch of 1,536 samples does not divide by 1,024".
std::string why_none(const SearchJob& job);

/// The values that a setting may have here, ascending: of the groups and
/// variants of the job, and of what saves memory.
std::vector<int64_t> values_of(const SearchJob& job, const SearchKey& key);

}  // namespace echelon
