// Text that others wrote, as a terminal may show it, or a shell take it.
#pragma once

#include <string>
#include <string_view>

namespace echelon {

/// `text` with '?' for each control character, those of Unicode included, and
/// for each byte that is not UTF-8, so that a name in a file cannot send
/// commands to the terminal. The characters of `kept`, such as "\n", stay.
std::string plain(std::string_view text, std::string_view kept = "");

/// `text` as one word of a POSIX shell: as it is, or between single quotes.
std::string shell_word(const std::string& text);

}  // namespace echelon
