// Tokens that are found in a text before it is split: "<|endoftext|>", runs of
// spaces, names.
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
  std::string content;       // what is looked for
  bool single_word = false;  // not within a word
  bool lstrip = false;       // takes the space before it along
  bool rstrip = false;       // and behind it
  bool normalized = true;    // is looked for in the normalised text
};

class AddedTokens {
 public:
  /// A part of a text: a token, or (id -1) what lies between.
  struct Part {
    size_t begin = 0;
    size_t end = 0;
    TokenId id = -1;
  };

  void add(AddedToken token);
  bool empty() const { return tokens_.empty(); }

  /// Cuts a text at the leftmost tokens, of those that begin there at the
  /// longest. Parts cover it, and are not empty.
  std::vector<Part> split(std::string_view text) const;

 private:
  const AddedToken* match(std::string_view rest) const;

  std::vector<AddedToken> tokens_;
  std::array<std::vector<size_t>, 256> by_byte_;  // longest first
};

}  // namespace echelon::detail
