// What tokenizers need of Unicode: classes of characters, regular expressions,
// normal forms. Texts are valid UTF-8. By ICU, which stays behind this header.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::detail {

/// The character at `at`, which is moved behind it.
char32_t next_character(std::string_view text, size_t& at);
void append_character(std::string& text, char32_t character);

bool is_letter(char32_t character);       // \p{L}
bool is_number(char32_t character);       // \p{N}
bool is_space(char32_t character);        // \p{White_Space}
bool is_word(char32_t character);         // \w of Unicode's regex rules
bool is_punctuation(char32_t character);  // \p{P}, and ASCII's symbols

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normal_form(const std::string& text, NormalForm form);

/// Each character by itself: a sigma does not know that it ends a word.
std::string lower_case(const std::string& text);

/// A part of a text, and whether the pattern matched it.
struct Span {
  size_t begin = 0;
  size_t end = 0;
  bool match = false;
};

/// A regular expression in the dialect of tokenizer.json (Oniguruma's Ruby).
/// Patterns of well-known tokenizers are matched by code of their own.
class Regex {
 public:
  enum class Known { none, gpt2, llama3, qwen2 };

  /// Throws DataError, beginning with `place`, for a pattern that is wrong.
  /// `shortcuts`: whether known patterns are to be recognised.
  Regex(
      const std::string& pattern, const std::string& place,
      bool shortcuts = true);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  /// Appends spans that cover `text` without a gap; none is empty.
  void split(std::string_view text, std::vector<Span>& spans) const;

 private:
  struct Compiled;
  Known known_ = Known::none;
  std::string place_;
  std::unique_ptr<Compiled> compiled_;
};

/// How the pattern of GPT-2's tokenizer splits a text.
extern const char* const kGpt2Pattern;

}  // namespace echelon::detail
