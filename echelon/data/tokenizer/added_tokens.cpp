#include "echelon/data/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "echelon/data/tokenizer/unicode.h"

namespace echelon::detail {
namespace {

/// The beginning of the character that ends at `at`.
size_t character_before(std::string_view text, size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80);
  return at;
}

bool word_at(std::string_view text, size_t at) {
  return at < text.size() && is_word(next_character(text, at));
}

}  // namespace

void AddedTokens::add(AddedToken token) {
  auto& same = by_byte_[static_cast<uint8_t>(token.content[0])];
  same.push_back(tokens_.size());
  tokens_.push_back(std::move(token));
  std::stable_sort(same.begin(), same.end(), [&](size_t a, size_t b) {
    return tokens_[a].content.size() > tokens_[b].content.size();
  });
}

const AddedToken* AddedTokens::match(std::string_view rest) const {
  for (const size_t i : by_byte_[static_cast<uint8_t>(rest[0])]) {
    if (rest.starts_with(tokens_[i].content)) return &tokens_[i];
  }
  return nullptr;
}

std::vector<AddedTokens::Part> AddedTokens::split(std::string_view text) const {
  std::vector<Part> parts;
  size_t done = 0;  // bytes covered by parts
  for (size_t at = 0; at < text.size();) {
    const AddedToken* token = match(text.substr(at));
    if (token == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + token->content.size();
    at = end;
    if (token->single_word &&
        ((begin > 0 && word_at(text, character_before(text, begin))) ||
         word_at(text, end))) {
      continue;
    }
    if (token->lstrip) {
      // White space of the previous token stays with that token.
      while (begin > done) {
        const size_t before = character_before(text, begin);
        size_t next = before;
        if (!is_space(next_character(text, next))) break;
        begin = std::max(before, done);
      }
    }
    if (token->rstrip) {
      for (size_t next = end; next < text.size(); end = next) {
        if (!is_space(next_character(text, next))) break;
      }
    }
    if (done < begin) parts.push_back({done, begin, -1});
    parts.push_back({begin, end, token->id});
    done = end;
  }
  if (done < text.size()) parts.push_back({done, text.size(), -1});
  return parts;
}

}  // namespace echelon::detail
