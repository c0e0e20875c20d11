// The components of a tokenizer.json: how a text is normalised, how it is split
// into words, and how tokens become text again. Each make_ function throws
// DataError that begins with `place` and names what is not known.
#pragma once

#include <deque>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "echelon/data/tokenizer/unicode.h"

namespace echelon::detail {

/// The "normalizer", which changes a text. Known: Sequence, Prepend, Replace,
/// NFC, NFD, NFKC, NFKD, Lowercase, Strip.
using Normalizer = std::function<void(std::string& text)>;

Normalizer
make_normalizer(const nlohmann::json& description, const std::string& place);

/// A text in pieces, which are views of the text or of strings kept here.
struct Pieces {
  struct Piece {
    std::string_view text;
    bool first = false;  // begins where the whole text begins
  };
  std::vector<Piece> list;
  std::deque<std::string> strings;
};

/// The "pre_tokenizer", which splits a text into words that become tokens one
/// by one. Known: Sequence, Split, ByteLevel, Metaspace, Whitespace,
/// WhitespaceSplit, Digits, Punctuation.
struct PreTokenizer {
  std::function<void(Pieces& pieces)> apply;
  /// Whether tokens consist of the bytes of words, not of their characters:
  /// true for ByteLevel, which must be the last of a sequence.
  bool in_bytes = false;
};

PreTokenizer
make_pre_tokenizer(const nlohmann::json& description, const std::string& place);

/// The "decoder", which changes the texts of tokens before they are joined.
/// Known: Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace.
using Decoder = std::function<void(std::vector<std::string>& tokens)>;

Decoder
make_decoder(const nlohmann::json& description, const std::string& place);

/// The pattern of Split and Replace: a string, or a regular expression.
class Pattern {
 public:
  /// From {"String": "a"} or {"Regex": "a+"}.
  Pattern(const nlohmann::json& description, const std::string& place);
  explicit Pattern(std::string literal) : literal_(std::move(literal)) {}

  /// Splits as Regex::split().
  void split(std::string_view text, std::vector<Span>& spans) const;
  /// `text` with `content` in place of each match.
  std::string replaced(std::string_view text, std::string_view content) const;

 private:
  std::string literal_;
  std::optional<Regex> regex_;
};

}  // namespace echelon::detail
