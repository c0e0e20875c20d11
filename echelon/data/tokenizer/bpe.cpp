// The merges are an open-addressing table from a pair of ids to the rank and
// the result. A word starts as single characters or bytes, and the adjacent
// pair of the lowest rank, the leftmost of equals, is merged until no pair is
// in the table. Short words scan an array of ranks for the minimum; long ones
// keep candidates in a heap and skip those that a merge has made stale, which
// takes n log n steps.
//
// Short words are looked up in a cache with one slot for each hash value; a new
// word replaces the old one. So encode() changes the object, and an object
// belongs to one thread.
#include "echelon/data/tokenizer/bpe.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <queue>

#include "echelon/data/tokenizer/unicode.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::detail {
namespace {

constexpr std::string_view kMetaspace = "\xe2\x96\x81";  // U+2581
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();
/// Words of up to this many symbols are merged by scanning all pairs
/// repeatedly.
constexpr size_t kShort = 48;

uint64_t pair_of(TokenId left, TokenId right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 |
         static_cast<uint32_t>(right);
}

size_t slot_of(uint64_t pair) {
  uint64_t x = pair * 0x9e3779b97f4a7c15u;
  x ^= x >> 32;
  return static_cast<size_t>(x);
}

std::string byte_token(uint8_t byte) {
  return format("<0x{:02X}>", byte);
}

}  // namespace

const std::array<std::string, 256>& byte_characters() {
  // Printable bytes of Latin-1 stand for themselves; the others are numbered
  // from U+0100.
  static const auto characters = [] {
    std::array<std::string, 256> made;
    char32_t next = 0x100;
    for (size_t byte = 0; byte < made.size(); ++byte) {
      const bool itself = (byte >= '!' && byte <= '~') ||
                          (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      append_character(
          made[byte], itself ? static_cast<char32_t>(byte) : next++);
    }
    return made;
  }();
  return characters;
}

bool bytes_of_token(std::string_view token, std::string& bytes) {
  static const auto numbers = [] {
    std::array<int16_t, 0x200> made;
    made.fill(-1);
    for (size_t byte = 0; byte < 256; ++byte) {
      size_t at = 0;
      made[next_character(byte_characters()[byte], at)] =
          static_cast<int16_t>(byte);
    }
    return made;
  }();
  bytes.clear();
  for (size_t at = 0; at < token.size();) {
    const char32_t character = next_character(token, at);
    if (character >= numbers.size() || numbers[character] < 0) return false;
    bytes += static_cast<char>(numbers[character]);
  }
  return true;
}

Bpe::Bpe(BpeModel model, const std::string& place)
    : model_(std::move(model)), cache_(kSlots) {
  if (model_.in_bytes &&
      !(model_.continuing_prefix.empty() && model_.end_suffix.empty())) {
    throw DataError(
        place +
        ": continuing_subword_prefix and end_of_word_suffix cannot be used "
        "with ByteLevel");
  }
  if (!model_.unknown.empty()) {
    unknown_ = id_of(model_.unknown);
    if (unknown_ < 0) {
      throw DataError(format(
          "{}: unk_token \"{}\" is not in the vocabulary", place,
          model_.unknown));
    }
  }
  for (size_t byte = 0; byte < bytes_.size(); ++byte) {
    bytes_[byte] = id_of(
        model_.in_bytes ? byte_characters()[byte]
                        : byte_token(static_cast<uint8_t>(byte)));
  }
  add_merges(place);
  split_at_metaspace_ = !model_.in_bytes && splits_at_metaspace();
  model_.merges.clear();
  model_.merges.shrink_to_fit();
  if (!model_.in_bytes) return;
  // From here on words are bytes.
  std::unordered_map<std::string, TokenId> vocab;
  std::string bytes;
  for (const auto& [token, id] : model_.vocab) {
    if (bytes_of_token(token, bytes)) vocab.emplace(bytes, id);
  }
  model_.vocab = std::move(vocab);
}

void Bpe::add_merges(const std::string& place) {
  const auto& merges = model_.merges;
  size_t size = 16;
  while (size < 2 * merges.size()) size *= 2;
  table_.resize(size);
  const size_t prefix = model_.continuing_prefix.size();
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    std::string result = left;
    if (right.size() >= prefix) result += right.substr(prefix);
    for (const std::string* token : {&left, &right, &std::as_const(result)}) {
      if (id_of(*token) >= 0) continue;
      throw DataError(format(
          "{}.merges[{}]: \"{}\" and \"{}\": \"{}\" is not in the vocabulary",
          place, rank, left, right, *token));
    }
    const uint64_t pair = pair_of(id_of(left), id_of(right));
    size_t at = slot_of(pair) & (size - 1);
    while (table_[at].pair != kNoPair && table_[at].pair != pair) {
      at = (at + 1) & (size - 1);
    }
    // Of two equal pairs the later one counts.
    table_[at] = {pair, static_cast<int32_t>(rank), id_of(result)};
  }
}

/// Whether "▁" can only be at the beginning of merged tokens, so that a text
/// without other splits can be encoded word by word.
bool Bpe::splits_at_metaspace() const {
  if (id_of(kMetaspace) < 0 || !model_.continuing_prefix.empty() ||
      !model_.end_suffix.empty() || model_.ignore_merges) {
    return false;
  }
  return std::ranges::none_of(model_.merges, [](const auto& merge) {
    const std::string result = merge.first + merge.second;
    size_t at = 0;
    while (result.compare(at, kMetaspace.size(), kMetaspace) == 0) {
      at += kMetaspace.size();
    }
    return result.find(kMetaspace, at) != std::string::npos;
  });
}

const Bpe::Merge* Bpe::find(TokenId left, TokenId right) const {
  const uint64_t pair = pair_of(left, right);
  const size_t mask = table_.size() - 1;
  for (size_t at = slot_of(pair) & mask;; at = (at + 1) & mask) {
    if (table_[at].pair == pair) return &table_[at];
    if (table_[at].pair == kNoPair) return nullptr;
  }
}

TokenId Bpe::id_of(std::string_view token) const {
  const auto found = model_.vocab.find(std::string(token));
  return found == model_.vocab.end() ? -1 : found->second;
}

void Bpe::encode(std::string_view word, std::vector<TokenId>& ids) const {
  if (!split_at_metaspace_) {
    encode_part(word, ids);
    return;
  }
  size_t begin = 0;
  for (size_t at = 0;;) {
    const size_t found = word.find(kMetaspace, at);
    if (found == std::string_view::npos) break;
    at = found + kMetaspace.size();
    const bool runs_on =
        found >= kMetaspace.size() &&
        word.substr(found - kMetaspace.size(), 3) == kMetaspace;
    if (found == begin || runs_on) continue;
    encode_part(word.substr(begin, found - begin), ids);
    begin = found;
  }
  if (begin < word.size()) encode_part(word.substr(begin), ids);
}

void Bpe::encode_part(std::string_view word, std::vector<TokenId>& ids) const {
  if (word.size() > Slot::kWord) {
    encode_fresh(word, ids);
    return;
  }
  Slot& slot = cache_[XXH3_64bits(word.data(), word.size()) & (kSlots - 1)];
  if (slot.length == word.size() &&
      std::memcmp(slot.word, word.data(), word.size()) == 0) {
    ids.insert(ids.end(), slot.ids, slot.ids + slot.count);
    return;
  }
  const size_t before = ids.size();
  encode_fresh(word, ids);
  const size_t count = ids.size() - before;
  if (count > Slot::kIds) return;
  std::memcpy(slot.word, word.data(), word.size());
  std::copy(ids.begin() + static_cast<ptrdiff_t>(before), ids.end(), slot.ids);
  slot.length = static_cast<uint8_t>(word.size());
  slot.count = static_cast<uint8_t>(count);
}

void Bpe::encode_fresh(std::string_view word, std::vector<TokenId>& ids) const {
  if (model_.ignore_merges) {
    if (const TokenId id = id_of(word); id >= 0) {
      ids.push_back(id);
      return;
    }
  }
  begin_ids(word);
  if (symbols_.size() > kShort) {
    merge_long();
  } else {
    merge_short();
  }
  ids.insert(ids.end(), symbols_.begin(), symbols_.end());
}

/// The tokens of single characters (or bytes), before any merge.
void Bpe::begin_ids(std::string_view word) const {
  symbols_.clear();
  if (model_.in_bytes) {
    for (size_t i = 0; i < word.size(); ++i) {
      const TokenId id = bytes_[static_cast<uint8_t>(word[i])];
      if (id >= 0) {
        symbols_.push_back(id);
      } else {
        add_unknown(word.substr(i, 1));
      }
    }
    return;
  }
  for (size_t at = 0; at < word.size();) {
    const size_t begin = at;
    next_character(word, at);
    std::string character(word.substr(begin, at - begin));
    if (begin > 0) character.insert(0, model_.continuing_prefix);
    if (at == word.size()) character += model_.end_suffix;
    const TokenId id = id_of(character);
    if (id >= 0) {
      symbols_.push_back(id);
    } else {
      add_unknown(character);
    }
  }
}

void Bpe::add_unknown(std::string_view character) const {
  if (model_.byte_fallback) {
    const bool all = std::ranges::all_of(character, [&](char c) {
      return bytes_[static_cast<uint8_t>(c)] >= 0;
    });
    if (all) {
      for (const char c : character) {
        symbols_.push_back(bytes_[static_cast<uint8_t>(c)]);
      }
      return;
    }
  }
  if (unknown_ < 0) {
    throw DataError(format(
        "the vocabulary has no token for \"{}\", and none for unknown text",
        character));
  }
  const bool fuse =
      model_.fuse_unknown && !symbols_.empty() && symbols_.back() == unknown_;
  if (!fuse) symbols_.push_back(unknown_);
}

void Bpe::merge_short() const {
  const auto rank_at = [&](size_t i) {
    const Merge* merge = find(symbols_[i], symbols_[i + 1]);
    return merge == nullptr ? kNoRank : merge->rank;
  };
  ranks_.clear();
  for (size_t i = 0; i + 1 < symbols_.size(); ++i) ranks_.push_back(rank_at(i));
  while (!ranks_.empty()) {
    const auto best = std::min_element(ranks_.begin(), ranks_.end());
    if (*best == kNoRank) return;
    const auto i = static_cast<size_t>(best - ranks_.begin());
    symbols_[i] = find(symbols_[i], symbols_[i + 1])->result;
    symbols_.erase(symbols_.begin() + static_cast<ptrdiff_t>(i) + 1);
    ranks_.erase(best);
    if (i < ranks_.size()) ranks_[i] = rank_at(i);
    if (i > 0) ranks_[i - 1] = rank_at(i - 1);
  }
}

// The symbols are a linked list in arrays. A candidate is a pair by its left
// symbol, with the result that the merge would have: a candidate whose pair has
// changed gives another result and is skipped.
void Bpe::merge_long() const {
  struct Candidate {
    int32_t rank;
    int32_t left;
    TokenId result;
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const auto size = static_cast<int32_t>(symbols_.size());
  std::vector<int32_t> before(symbols_.size()), after(symbols_.size());
  std::vector<Candidate> storage;
  storage.reserve(symbols_.size());
  std::priority_queue<Candidate> queue({}, std::move(storage));
  const auto symbol = [&](int32_t i) -> TokenId& {
    return symbols_[static_cast<size_t>(i)];
  };
  const auto add = [&](int32_t left) {
    if (left < 0) return;
    const int32_t right = after[static_cast<size_t>(left)];
    if (right == size) return;
    const Merge* merge = find(symbol(left), symbol(right));
    if (merge != nullptr) queue.push({merge->rank, left, merge->result});
  };
  for (int32_t i = 0; i < size; ++i) {
    before[static_cast<size_t>(i)] = i - 1;
    after[static_cast<size_t>(i)] = i + 1;
  }
  for (int32_t i = 0; i < size; ++i) add(i);
  constexpr TokenId kMerged = -1;
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    if (symbol(top.left) == kMerged) continue;
    const int32_t right = after[static_cast<size_t>(top.left)];
    if (right == size) continue;
    // The symbols may have changed since the pair was queued.
    const Merge* merge = find(symbol(top.left), symbol(right));
    if (merge == nullptr || merge->result != top.result) continue;
    symbol(top.left) = merge->result;
    symbol(right) = kMerged;
    const int32_t next = after[static_cast<size_t>(right)];
    after[static_cast<size_t>(top.left)] = next;
    if (next < size) before[static_cast<size_t>(next)] = top.left;
    add(before[static_cast<size_t>(top.left)]);
    add(top.left);
  }
  std::erase(symbols_, kMerged);
}

}  // namespace echelon::detail
