// The "pre_tokenizer" of a tokenizer.json: how a text is split into words, each
// of which becomes tokens by itself. Known: Sequence, Split, ByteLevel,
// Metaspace, Whitespace, WhitespaceSplit, Digits, Punctuation.
#pragma once

#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::detail {

/// A text in pieces. Pieces are views of the text, or of strings kept here.
struct Pieces {
  struct Piece {
    std::string_view text;
    bool first = false;  // begins where the whole text begins
  };
  std::vector<Piece> list;
  std::deque<std::string> strings;
};

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void apply(Pieces& pieces) const = 0;
  /// Whether the bytes of words, not their characters, are what tokens are made
  /// of: ByteLevel, which is then the last in a sequence.
  virtual bool in_bytes() const { return false; }
};

/// Throws as make_normalizer().
std::unique_ptr<PreTokenizer>
make_pre_tokenizer(const nlohmann::json& description, const std::string& place);

}  // namespace echelon::detail
