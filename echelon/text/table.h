// Columns of text, aligned.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon {

/// Characters of a UTF-8 text, each taken to be one column wide.
size_t columns(std::string_view text);

/// Pads each column to its widest cell; two spaces between columns. Lines end
/// without spaces.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

/// `text`, broken between words so that no line passes column `last`; every
/// line but the first begins at column `indent`, where the first one stands.
std::string wrapped(const std::string& text, size_t indent, size_t last);

}  // namespace echelon
