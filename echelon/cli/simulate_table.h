// `echelon simulate --table FILE.csv`: what each row of a table of steps takes.
#pragma once

#include <string>

namespace echelon::cli {

/// Prints, for people, each file's errors and what was excluded; with `json` every row
/// in the file's order, and the same errors. `planned`: also what the planner's search
/// says of each row's layout. Returns the exit code. Throws DataError
/// for a table that cannot be read.
int simulate_table(const std::string& path, bool json, bool planned);

}  // namespace echelon::cli
