// Unicode for tokenizers: classes of characters, regular expressions, normal
// forms. Texts are valid UTF-8. Only unicode.cpp uses ICU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

struct URegularExpression;  // of ICU

namespace echelon::detail {

/// The character at `at`; moves `at` to the next one.
char32_t next_character(std::string_view text, size_t& at);
void append_character(std::string& text, char32_t character);

bool is_letter(char32_t character);       // \p{L}
bool is_number(char32_t character);       // \p{N}
bool is_space(char32_t character);        // \p{White_Space}
bool is_word(char32_t character);         // \w of Unicode's regex rules
bool is_punctuation(char32_t character);  // \p{P}, and ASCII's symbols

/// `text` without the spaces at its ends, or at one of them.
std::string_view
stripped(std::string_view text, bool left = true, bool right = true);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normal_form(const std::string& text, NormalForm form);

/// Each character by itself: no form of sigma for the end of a word.
std::string lower_case(const std::string& text);

/// A part of a text, and whether the pattern matched it.
struct Span {
  size_t begin = 0;
  size_t end = 0;
  bool match = false;
};

/// A regular expression in the dialect of tokenizer.json (Oniguruma's Ruby).
/// split_words() matches the patterns of well-known tokenizers. One thread may
/// use an expression and its copies at a time.
class Regex {
 public:
  enum class Known { none, gpt2, llama3, qwen2 };

  /// Throws DataError, which begins with `place`, for a wrong pattern. Without
  /// `shortcuts` known patterns are not recognised.
  Regex(
      const std::string& pattern, const std::string& place,
      bool shortcuts = true);

  /// Appends spans that cover `text` without gaps; none is empty. Throws
  /// DataError where matching takes far too many steps for the text's length,
  /// as "(a+)+$" may.
  void split(std::string_view text, std::vector<Span>& spans) const;

 private:
  Known known_ = Known::none;
  std::string place_;
  std::shared_ptr<URegularExpression> compiled_;
};

/// The pattern of GPT-2's tokenizer.
extern const char* const kGpt2Pattern;

/// Appends what Regex::split() of a known pattern does. Written by hand, since
/// a general matcher takes most of a tokenizer's time.
void split_words(
    std::string_view text, Regex::Known known, std::vector<Span>& spans);

}  // namespace echelon::detail
