// Text to token ids, and back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

using TokenId = int32_t;

/// Where a long text may be cut so that its pieces, encoded one by one, give
/// the ids of the whole.
enum class TextCut {
  anywhere,      // between any two bytes
  before_space,  // between a letter and the space that leads to the next word
  at_space,      // there, and the space is left out: the encoder adds it
  nowhere,
};

/// One thread uses a tokenizer at a time: it remembers the words that it saw.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// The ids of `text`, which is UTF-8; what is not becomes U+FFFD, one for
  /// each maximal part of a character (the tokenizer of bytes takes anything).
  /// With `specials` also the tokens that the tokenizer puts around a text.
  /// Throws DataError where the tokenizer has no id for a part of the text.
  virtual std::vector<TokenId>
  encode(std::string_view text, bool specials = false) const = 0;

  /// The text of `ids`; special tokens are written out. It may begin or end
  /// within a character. Throws DataError for an id that is no token.
  virtual std::string decode(std::span<const TokenId> ids) const = 0;

  /// Ids are below this.
  virtual int64_t vocab_size() const = 0;

  /// The id of a token by its name: "<s>", "<|endoftext|>".
  virtual std::optional<TokenId> find(const std::string& token) const = 0;

  /// The token that ends a document, when there is one.
  virtual std::optional<TokenId> end_of_text() const = 0;
};

/// The 256 bytes, and 256 for the end of a text.
class ByteTokenizer : public Tokenizer {
 public:
  static constexpr int64_t kVocabulary = 257;
  static constexpr TokenId kEndOfText = 256;
  static constexpr const char* kEndOfTextName = "<|endoftext|>";

  std::vector<TokenId>
  encode(std::string_view text, bool specials) const override;
  std::string decode(std::span<const TokenId> ids) const override;
  int64_t vocab_size() const override { return kVocabulary; }
  std::optional<TokenId> find(const std::string& token) const override;
  std::optional<TokenId> end_of_text() const override { return kEndOfText; }
};

/// "bytes"; the path of a Hugging Face tokenizer.json (json_tokenizer.h), or of
/// a SentencePiece model (any file that ends in .model). Throws DataError for a
/// file that cannot be read or is not one, ConfigError for another name.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name);

/// How long texts may be cut for `tokenizer`, found by encoding some words.
TextCut find_text_cut(const Tokenizer& tokenizer);

/// Names under which tokenizers know the token that ends a document, the first
/// that `tokenizer` has.
std::optional<TokenId> find_end_of_text(const Tokenizer& tokenizer);

/// `text` with U+FFFD for each maximal part that is no UTF-8.
std::string valid_utf8(std::string_view text);

/// How many bytes of `text` are whole characters: all but the beginning of one
/// at the end that more bytes may complete.
size_t whole_characters(std::string_view text);

}  // namespace echelon
