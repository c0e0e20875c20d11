// A check of Echelon's own invariants, which is on in every build. What a user
// can get wrong is a ConfigError or a DataError instead.
#pragma once

#include <string_view>

#include "echelon/text/format.h"

namespace echelon::detail {

[[noreturn]] void check_failed(
    std::string_view condition, std::string_view file, int line,
    const std::string& what);

}  // namespace echelon::detail

/// Throws InternalError unless `condition` holds. The other arguments are those
/// of format(), and say what is wrong:
///
///   ECHELON_CHECK(rank.done, "rank {} waits for ever", rank.number);
#define ECHELON_CHECK(condition, ...)          \
  do {                                         \
    if (!(condition)) [[unlikely]]             \
      ::echelon::detail::check_failed(         \
          #condition, __FILE_NAME__, __LINE__, \
          ::echelon::format(__VA_ARGS__));     \
  } while (false)
