// Columns of text, aligned.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon::cli {

/// Characters of a UTF-8 text, each taken to be one column wide.
size_t columns(std::string_view text);

/// Pads each column to its widest cell; two spaces between columns. Lines end
/// without spaces.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

}  // namespace echelon::cli
