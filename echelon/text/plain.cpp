#include "echelon/text/plain.h"

#include <cstddef>

namespace echelon {
namespace {

// The bytes of the UTF-8 character at the beginning of `text`, which is not
// empty; 0: there is none.
size_t character_bytes(std::string_view text) {
  const unsigned char lead = text[0];
  const size_t bytes = lead < 0x80                    ? 1
                       : lead >= 0xc2 && lead <= 0xdf ? 2
                       : lead >= 0xe0 && lead <= 0xef ? 3
                       : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                      : 0;
  if (bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((text[i] & 0xc0) != 0x80) return 0;
  }
  return bytes;
}

// Whether the character is one of U+0000 to U+001F and U+007F to U+009F.
bool is_control(std::string_view character) {
  const unsigned char lead = character[0];
  const bool of_two_bytes = character.size() == 2 && lead == 0xc2 &&
                            static_cast<unsigned char>(character[1]) < 0xa0;
  return lead < 0x20 || lead == 0x7f || of_two_bytes;
}

}  // namespace

std::string plain(std::string_view text, std::string_view kept) {
  std::string shown;
  while (!text.empty()) {
    const size_t bytes = character_bytes(text);
    const std::string_view character = text.substr(0, bytes);
    const bool stays = bytes > 0 && (!is_control(character) ||
                                     kept.find(character) != kept.npos);
    shown += stays ? character : "?";
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return shown;
}

std::string shell_word(const std::string& text) {
  constexpr const char* kPlain =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
      "-_./=,:@%+";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) {
    return text;
  }
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

}  // namespace echelon
