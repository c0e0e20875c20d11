// How well-known patterns split a text into words, by hand: a general matcher
// takes most of a tokenizer's time.
#pragma once

#include <string_view>
#include <vector>

#include "echelon/data/tokenizer/unicode.h"

namespace echelon::detail {

/// Appends what Regex::split() of the pattern does; `known` is not none.
void split_words(
    std::string_view text, Regex::Known known, std::vector<Span>& spans);

}  // namespace echelon::detail
