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

/// Where a long text may be split so that its pieces, encoded one by one, have
/// the ids of the whole text.
enum class TextSplit {
  anywhere,      // between any two bytes
  before_space,  // between a letter and the space that leads to the next word
  at_space,      // the same, and the space is dropped: the encoder adds it
  nowhere,
};

/// Only one thread may use a tokenizer at a time: it caches words.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// The ids of `text`. Each maximal part that is not UTF-8 becomes U+FFFD (the
  /// tokenizer of bytes takes any bytes). With `specials` also the tokens that
  /// the tokenizer adds around a text. Throws DataError where the tokenizer has
  /// no id for a part of the text.
  virtual std::vector<TokenId>
  encode(std::string_view text, bool specials = false) const = 0;

  /// The text of `ids` with the names of special tokens. It may begin or end
  /// within a character. Throws DataError for an id that is not a token.
  virtual std::string decode(std::span<const TokenId> ids) const = 0;

  /// All ids are below this number.
  virtual int64_t vocab_size() const = 0;

  /// The id of a token by its name: "<s>", "<|endoftext|>".
  virtual std::optional<TokenId> find(const std::string& token) const = 0;

  /// The token that ends a document, if there is one.
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

/// `name` is "bytes", the path of a Hugging Face tokenizer.json, or the path of
/// a SentencePiece model, which ends in .model. Throws DataError for a file
/// that cannot be read or is not a tokenizer, ConfigError for another name.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name);

/// The tokenizer of a Hugging Face tokenizer.json: byte-pair encoding as the
/// files of GPT-2, Llama-2, Llama-3 and similar models describe it, with the
/// components of components.h; the post-processors TemplateProcessing,
/// RobertaProcessing, BertProcessing, ByteLevel, Sequence; and added tokens
/// with all their flags. "truncation" and "padding" are not applied. The ids
/// are those of Python's `tokenizers`.
///
/// Throws DataError with `path` and the place in it when the file is not JSON,
/// or when a component is unknown or inconsistent.
std::unique_ptr<Tokenizer> load_json_tokenizer(const std::string& path);

/// The same from the content of the file.
std::unique_ptr<Tokenizer>
parse_json_tokenizer(std::string_view content, const std::string& path);

/// Any model that the SentencePiece library reads: BPE, unigram, and others.
/// Throws DataError for another file.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);

/// How long texts may be split for `tokenizer`, found by encoding some words.
TextSplit find_text_split(const Tokenizer& tokenizer);

/// The token of `tokenizer` that ends a document, found by its usual names.
std::optional<TokenId> find_end_of_text(const Tokenizer& tokenizer);

/// `text` with U+FFFD in place of each maximal part that is not UTF-8.
std::string valid_utf8(std::string_view text);

/// The number of bytes of `text` without an incomplete character at its end
/// that further bytes may complete.
size_t whole_characters(std::string_view text);

}  // namespace echelon
