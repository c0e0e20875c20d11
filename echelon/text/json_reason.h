// Why a text is no JSON, or not the JSON that was expected, for error messages.
#pragma once

#include <exception>
#include <string>

namespace echelon {

/// What the library says, without its own "[json.exception.parse_error.101] ".
inline std::string json_reason(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return text.starts_with("[json.") && end != std::string::npos
             ? text.substr(end + 2)
             : text;
}

}  // namespace echelon
