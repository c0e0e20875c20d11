// The components of a tokenizer.json: how a text is normalised, how it is split
// into words, and how tokens become text again. Each make_ function throws
// DataError that begins with `place` and names what is not known.
#pragma once

#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/data/tokenizer/unicode.h"

namespace echelon::detail {

/// The "normalizer". Known: Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD,
/// Lowercase, Strip.
class Normalizer {
 public:
  virtual ~Normalizer() = default;
  virtual void apply(std::string& text) const = 0;
};

std::unique_ptr<Normalizer>
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
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void apply(Pieces& pieces) const = 0;
  /// Whether tokens consist of the bytes of words, not of their characters:
  /// true for ByteLevel, which must be the last of a sequence.
  virtual bool in_bytes() const { return false; }
};

std::unique_ptr<PreTokenizer>
make_pre_tokenizer(const nlohmann::json& description, const std::string& place);

/// The "decoder". Known: Sequence, ByteLevel, ByteFallback, Fuse, Replace,
/// Strip, Metaspace.
class Decoder {
 public:
  virtual ~Decoder() = default;
  /// Changes the texts of tokens, which are joined afterwards.
  virtual void apply(std::vector<std::string>& tokens) const = 0;
};

std::unique_ptr<Decoder>
make_decoder(const nlohmann::json& description, const std::string& place);

/// The pattern of Split and Replace: a string, or a regular expression.
class Pattern {
 public:
  /// From {"String": "a"} or {"Regex": "a+"}.
  Pattern(const nlohmann::json& description, const std::string& place);

  /// Splits as Regex::split().
  void split(std::string_view text, std::vector<Span>& spans) const;

 private:
  std::string literal_;
  std::optional<Regex> regex_;
};

}  // namespace echelon::detail
