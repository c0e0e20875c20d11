// The text of the error that a call throws.
#pragma once

#include <gmock/gmock.h>

#include <string>

#include "echelon/error.h"

namespace echelon {

/// What `call` throws as an ErrorType; other errors pass through.
template <typename ErrorType = Error, typename Call>
std::string error_text(Call&& call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "no error";
}

/// Matches a text that contains each of `parts`.
template <typename... Parts>
auto HasAll(const Parts&... parts) {
  return testing::AllOf(testing::HasSubstr(parts)...);
}

}  // namespace echelon
