#include "echelon/data/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// The length of the character at the front of `text`. If it is incomplete,
/// `whole` is false and the result is the length of its longest valid
/// beginning, or 1 for a byte that begins no character. Unicode 15,
/// section 3.9, tables 3-7 and 3-8.
size_t front_character(std::string_view text, bool& whole) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  whole = first < 0x80;
  if (whole) return 1;
  size_t length = 0;
  uint8_t low = 0x80, high = 0xbf;  // range of the second byte
  if (first >= 0xc2 && first <= 0xdf) length = 2;
  if (first >= 0xe0 && first <= 0xef) length = 3;
  if (first >= 0xf0 && first <= 0xf4) length = 4;
  if (first == 0xe0) low = 0xa0;
  if (first == 0xed) high = 0x9f;
  if (first == 0xf0) low = 0x90;
  if (first == 0xf4) high = 0x8f;
  if (length == 0) return 1;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size() || byte(i) < low || byte(i) > high) return i;
    low = 0x80;
    high = 0xbf;
  }
  whole = true;
  return length;
}

bool ends_in(const std::string& name, const std::string& suffix) {
  return name.size() > suffix.size() && name.ends_with(suffix);
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string valid;
  valid.reserve(text.size());
  size_t copied = 0;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    bool whole = false;
    const size_t length = front_character(text.substr(at), whole);
    if (!whole) {
      valid.append(text.substr(copied, at - copied));
      valid += "\xef\xbf\xbd";
      copied = at + length;
    }
    at += length;
  }
  valid.append(text.substr(copied));
  return valid;
}

size_t whole_characters(std::string_view text) {
  const size_t longest = std::min<size_t>(text.size(), 3);
  for (size_t back = 1; back <= longest; ++back) {
    const size_t at = text.size() - back;
    const auto byte = static_cast<uint8_t>(text[at]);
    if (byte < 0x80) break;
    if (byte < 0xc0) continue;  // within a character
    bool whole = false;
    const size_t length = front_character(text.substr(at), whole);
    const bool begins = byte >= 0xc2 && byte <= 0xf4;
    return !whole && length == back && begins ? at : text.size();
  }
  return text.size();
}

std::vector<TokenId> ByteTokenizer::encode(std::string_view text, bool) const {
  std::vector<TokenId> ids(text.size());
  std::transform(text.begin(), text.end(), ids.begin(), [](char c) {
    return static_cast<TokenId>(static_cast<uint8_t>(c));
  });
  return ids;
}

std::string ByteTokenizer::decode(std::span<const TokenId> ids) const {
  std::string text;
  for (const TokenId id : ids) {
    if (id < 0 || id >= kVocabulary) {
      throw DataError(format(
          "token {} is not a byte; ids are 0 to {}", id, kVocabulary - 1));
    }
    if (id == kEndOfText) {
      text += kEndOfTextName;
    } else {
      text += static_cast<char>(id);
    }
  }
  return text;
}

std::optional<TokenId> ByteTokenizer::find(const std::string& token) const {
  if (token == kEndOfTextName) return kEndOfText;
  if (token.size() != 1) return std::nullopt;
  return static_cast<TokenId>(static_cast<uint8_t>(token[0]));
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  std::error_code error;
  if (std::filesystem::exists(name, error) &&
      !std::filesystem::is_regular_file(name, error)) {
    throw DataError(
        name + ": is no regular file; [data] tokenizer must name a file");
  }
  if (ends_in(name, ".json")) return load_json_tokenizer(name);
  if (ends_in(name, ".model")) return load_sentencepiece(name);
  throw ConfigError(format(
      "[data] tokenizer=\"{}\": must be \"bytes\", a tokenizer.json, or a "
      "SentencePiece .model",
      name));
}

TextSplit find_text_split(const Tokenizer& tokenizer) {
  if (dynamic_cast<const ByteTokenizer*>(&tokenizer))
    return TextSplit::anywhere;
  const std::array<std::pair<std::string, std::string>, 6> places = {{
      {"word", "word"},
      {"It was the last", "of all, and the 2nd"},
      {"many\n\n more   words", "they said: \xc3\xa9t\xc3\xa9"},
      {"a", "b"},
      {"(one) two", "three\tfour"},
      {"THE END", "Of It"},
  }};
  const auto holds = [&](const std::string& lead) {
    return std::all_of(places.begin(), places.end(), [&](const auto& place) {
      auto pieces = tokenizer.encode(place.first);
      const auto rest = tokenizer.encode(lead + place.second);
      pieces.insert(pieces.end(), rest.begin(), rest.end());
      return pieces == tokenizer.encode(place.first + " " + place.second);
    });
  };
  if (holds(" ")) return TextSplit::before_space;
  if (holds("")) return TextSplit::at_space;
  return TextSplit::nowhere;
}

std::optional<TokenId> find_end_of_text(const Tokenizer& tokenizer) {
  for (const char* name :
       {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>",
        "[EOS]"}) {
    if (const auto id = tokenizer.find(name)) return id;
  }
  return std::nullopt;
}

}  // namespace echelon
