// The text of the error that a call throws.
#pragma once

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

}  // namespace echelon
