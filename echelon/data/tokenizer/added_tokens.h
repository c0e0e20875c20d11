// Tokens that are matched in a text before it is split into words, such as
// "<|endoftext|>", runs of spaces, names.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/data/tokenizer/tokenizer.h"

namespace echelon::detail {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  // does not match within a word
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
  bool normalized = true;    // matches in the normalised text
};

class AddedTokens {
 public:
  /// A part of a text: a token, or (id -1) the text between tokens.
  struct Part {
    size_t begin = 0;
    size_t end = 0;
    TokenId id = -1;
  };

  void add(AddedToken token);
  bool empty() const { return tokens_.empty(); }

  /// Splits a text at the leftmost and then longest matches. The parts cover
  /// the text, and none is empty.
  std::vector<Part> split(std::string_view text) const;

 private:
  const AddedToken* match(std::string_view rest) const;

  std::vector<AddedToken> tokens_;
  std::array<std::vector<size_t>, 256> by_byte_;  // longest first
};

}  // namespace echelon::detail
