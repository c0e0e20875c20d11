// Byte-pair encoding of single words.
// Source: Sennrich, Haddow, Birch, "Neural machine translation of rare words
// with subword units", 2016, arXiv:1508.07909; over bytes: Radford et al.,
// "Language models are unsupervised multitask learners", 2019.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "echelon/data/tokenizer/tokenizer.h"

namespace echelon::detail {

struct BpeModel {
  std::unordered_map<std::string, TokenId> vocab;
  std::vector<std::pair<std::string, std::string>> merges;  // in order
  std::string unknown;            // the token for unknown text; "": none
  std::string continuing_prefix;  // of tokens that do not begin a word
  std::string end_suffix;         // of tokens that end a word
  bool fuse_unknown = false;      // neighbouring unknowns become one token
  bool byte_fallback = false;     // <0x41> for bytes of unknown text
  bool ignore_merges = false;     // a word in the vocabulary is one token
  bool in_bytes = false;          // words are bytes, see byte_characters()
};

/// The character that stands for a byte in tokens of byte-level models.
const std::array<std::string, 256>& byte_characters();
/// The bytes of a token in those characters; false where it has other ones.
bool bytes_of_token(std::string_view token, std::string& bytes);

class Bpe {
 public:
  /// Throws DataError, which begins with `place`, when the parts or the result
  /// of a merge, or the token for unknown text, are not in the vocabulary.
  Bpe(BpeModel model, const std::string& place);

  /// Appends the tokens of a word. Throws DataError where a part of it is not
  /// in the vocabulary and there is no token for unknown text. (Hugging Face's
  /// tokenizers drop such parts silently.)
  void encode(std::string_view word, std::vector<TokenId>& ids) const;

 private:
  struct Merge {
    uint64_t pair = kNoPair;
    int32_t rank = 0;
    TokenId result = 0;
  };
  /// A cached word and its tokens: the last word with its hash.
  struct Slot {
    static constexpr size_t kWord = 30;
    static constexpr size_t kIds = 8;
    char word[kWord];
    uint8_t length = 0;  // 0: empty
    uint8_t count = 0;
    TokenId ids[kIds];
  };

  static constexpr uint64_t kNoPair = ~uint64_t{0};
  static constexpr size_t kSlots = size_t{1} << 15;

  void add_merges(const std::string& place);
  bool splits_at_metaspace() const;
  const Merge* find(TokenId left, TokenId right) const;
  TokenId id_of(std::string_view token) const;
  void encode_part(std::string_view word, std::vector<TokenId>& ids) const;
  void encode_fresh(std::string_view word, std::vector<TokenId>& ids) const;
  void begin_ids(std::string_view word) const;
  void add_unknown(std::string_view character) const;
  void merge_short() const;
  void merge_long() const;

  BpeModel model_;
  std::vector<Merge> table_;  // open addressing, a power of two
  TokenId unknown_ = -1;
  std::array<TokenId, 256> bytes_;   // tokens of single bytes; -1: none
  bool split_at_metaspace_ = false;  // no merge spans "x▁"
  // Scratch memory: one thread uses a tokenizer at a time.
  mutable std::vector<Slot> cache_;
  mutable std::vector<TokenId> symbols_;
  mutable std::vector<int32_t> ranks_;
};

}  // namespace echelon::detail
