// Keys and answers as S3 writes them. Private to this folder.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon::storage {

/// Percent-encoded, as signatures want it.
std::string encoded(std::string_view text, bool keep_slashes = false);
std::string decoded(std::string_view text);

/// The text of the first element of that name; empty when there is none. S3's
/// answers nest no element in one of its own name, and its texts have no "<".
std::string element(std::string_view xml, const std::string& name);
/// Each element of that name, without its end.
std::vector<std::string_view>
elements(std::string_view xml, const std::string& name);

}  // namespace echelon::storage
