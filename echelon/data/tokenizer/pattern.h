// What Split and Replace look for: a string, or a regular expression.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/data/tokenizer/unicode.h"

namespace echelon::detail {

class Pattern {
 public:
  /// From {"String": "a"} or {"Regex": "a+"}.
  Pattern(const nlohmann::json& description, const std::string& place);

  /// As Regex::split().
  void split(std::string_view text, std::vector<Span>& spans) const;

 private:
  std::string literal_;
  std::optional<Regex> regex_;
};

}  // namespace echelon::detail
