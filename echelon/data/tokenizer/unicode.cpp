// ICU has the tables, the regular expressions and the normal forms. It works on
// UTF-16, so matches are counted back into bytes of UTF-8.
//
// The patterns of GPT-2, of Llama 3 and GPT-4, and of Qwen 2 are matched by
// hand instead, many times faster: Splitter looks at the class of each
// character and takes the alternatives of the pattern in their order.
// tokenizer_test compares it with ICU.
#include "echelon/data/tokenizer/unicode.h"

#include <unicode/uchar.h>
#include <unicode/unorm2.h>
#include <unicode/uregex.h>
#include <unicode/ustring.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::detail {
namespace {

void check(UErrorCode status, const std::string& what) {
  if (U_FAILURE(status)) {
    throw DataError(what + ": " + u_errorName(status));
  }
}

std::u16string to_utf16(std::string_view text) {
  std::u16string wide(text.size(), u'\0');
  int32_t length = 0;
  UErrorCode status = U_ZERO_ERROR;
  u_strFromUTF8(
      wide.data(), static_cast<int32_t>(wide.size()), &length, text.data(),
      static_cast<int32_t>(text.size()), &status);
  // The status may be a warning that there is no terminating zero.
  check(status, "a text of tokens");
  wide.resize(static_cast<size_t>(length));
  return wide;
}

std::string to_utf8(const std::u16string& wide) {
  std::string text(wide.size() * 3, '\0');
  int32_t length = 0;
  UErrorCode status = U_ZERO_ERROR;
  u_strToUTF8(
      text.data(), static_cast<int32_t>(text.size()), &length, wide.data(),
      static_cast<int32_t>(wide.size()), &status);
  check(status, "a text of tokens");
  text.resize(static_cast<size_t>(length));
  return text;
}

bool is_ascii(const std::string& text) {
  for (const char c : text) {
    if (static_cast<uint8_t>(c) >= 0x80) return false;
  }
  return true;
}

// Oniguruma counts the Latin-1 numbers that are not digits as word characters.
#define ECHELON_WORD \
  "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u00b2\\u00b3\\u00b9\\u00bc-\\u00be"

constexpr std::pair<char, const char*> kClasses[] = {
    {'s', "[\\p{White_Space}]"}, {'S', "[^\\p{White_Space}]"},
    {'w', "[" ECHELON_WORD "]"}, {'W', "[^" ECHELON_WORD "]"},
    {'h', "[0-9a-fA-F]"},        {'H', "[^0-9a-fA-F]"}};

/// Translates Oniguruma's Ruby dialect to ICU's: writes out the classes that
/// differ.
std::string translate(const std::string& pattern, const std::string& place) {
  std::string out;
  bool in_set = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '[') in_set = true;
    if (c == ']') in_set = false;
    // In Ruby a{1,3}+ repeats a{1,3}; in ICU it is possessive.
    if (c == '}' && !in_set && i + 1 < pattern.size() &&
        pattern[i + 1] == '+') {
      throw DataError(
          place + ": the pattern " + pattern +
          " has }+, whose meaning depends on the dialect; write (?:...)+");
    }
    if (c != '\\' || i + 1 == pattern.size()) {
      out += c;
      continue;
    }
    const char kind = pattern[++i];
    const auto* set =
        std::ranges::find(kClasses, kind, &std::pair<char, const char*>::first);
    if (set != std::end(kClasses)) {
      out += set->second;
      continue;
    }
    out += c;
    out += kind;
    // Copies the name of a property or the number of a character.
    if (i + 1 < pattern.size() && pattern[i + 1] == '{') {
      const size_t end = std::min(pattern.find('}', i), pattern.size() - 1);
      out.append(pattern, i + 1, end - i);
      i = end;
    }
  }
  return out;
}

size_t utf8_bytes(const std::u16string& wide, int32_t begin, int32_t end) {
  size_t bytes = 0;
  for (int32_t i = begin; i < end; ++i) {
    const char16_t unit = wide[static_cast<size_t>(i)];
    if (unit < 0x80) {
      bytes += 1;
    } else if (unit < 0x800 || U16_IS_SURROGATE(unit)) {
      bytes += 2;  // a surrogate pair has four
    } else {
      bytes += 3;
    }
  }
  return bytes;
}

}  // namespace

const char* const kGpt2Pattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
    "\\s+(?!\\S)|\\s+";

namespace {

constexpr const char* kLlama3Pattern =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
constexpr const char* kQwen2Pattern =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

}  // namespace

char32_t next_character(std::string_view text, size_t& at) {
  UChar32 character = 0;
  auto i = static_cast<int32_t>(0);
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data()) + at;
  U8_NEXT_UNSAFE(bytes, i, character);
  at += static_cast<size_t>(i);
  return static_cast<char32_t>(character);
}

void append_character(std::string& text, char32_t character) {
  std::array<uint8_t, 4> bytes;
  int32_t length = 0;
  U8_APPEND_UNSAFE(bytes.data(), length, static_cast<UChar32>(character));
  text.append(
      reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(length));
}

bool is_letter(char32_t character) {
  return (U_GET_GC_MASK(static_cast<UChar32>(character)) & U_GC_L_MASK) != 0;
}
bool is_number(char32_t character) {
  return (U_GET_GC_MASK(static_cast<UChar32>(character)) & U_GC_N_MASK) != 0;
}
bool is_space(char32_t character) {
  return u_isUWhiteSpace(static_cast<UChar32>(character)) != 0;
}
bool is_word(char32_t character) {
  const auto c = static_cast<UChar32>(character);
  constexpr uint32_t kMask = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_isUAlphabetic(c) || (U_GET_GC_MASK(c) & kMask) != 0 || c == 0x200c ||
         c == 0x200d;
}
bool is_punctuation(char32_t character) {
  if (character < 0x80) {
    return (character >= '!' && character <= '/') ||
           (character >= ':' && character <= '@') ||
           (character >= '[' && character <= '`') ||
           (character >= '{' && character <= '~');
  }
  return (U_GET_GC_MASK(static_cast<UChar32>(character)) & U_GC_P_MASK) != 0;
}

std::string_view stripped(std::string_view text, bool left, bool right) {
  size_t begin = 0, end = 0, at = 0;
  bool leading = true;
  while (at < text.size()) {
    const bool space = is_space(next_character(text, at));
    if (space && leading) begin = at;
    if (!space) end = at;
    leading = leading && space;
  }
  if (!left) begin = 0;
  if (!right) end = text.size();
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

std::string normal_form(const std::string& text, NormalForm form) {
  if (is_ascii(text)) return text;
  UErrorCode status = U_ZERO_ERROR;
  constexpr const UNormalizer2* (*kNormalizers[])(UErrorCode*) = {
      unorm2_getNFCInstance, unorm2_getNFDInstance, unorm2_getNFKCInstance,
      unorm2_getNFKDInstance};
  const auto* normalizer = kNormalizers[static_cast<size_t>(form)](&status);
  check(status, "ICU's normal forms");
  const std::u16string wide = to_utf16(text);
  std::u16string out(wide.size() + 16, u'\0');
  while (true) {
    status = U_ZERO_ERROR;
    const int32_t length = unorm2_normalize(
        normalizer, wide.data(), static_cast<int32_t>(wide.size()), out.data(),
        static_cast<int32_t>(out.size()), &status);
    out.resize(static_cast<size_t>(length));
    if (status != U_BUFFER_OVERFLOW_ERROR) break;
  }
  check(status, "ICU's normal forms");
  return to_utf8(out);
}

std::string lower_case(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const char32_t character = next_character(text, at);
    if (character < 0x80) {
      const bool upper = character >= 'A' && character <= 'Z';
      out += static_cast<char>(upper ? character + 32 : character);
      continue;
    }
    std::string one;
    append_character(one, character);
    const std::u16string wide = to_utf16(one);
    std::u16string lower(8, u'\0');
    UErrorCode status = U_ZERO_ERROR;
    const int32_t length = u_strToLower(
        lower.data(), static_cast<int32_t>(lower.size()), wide.data(),
        static_cast<int32_t>(wide.size()), "", &status);
    check(status, "ICU's lower case");
    lower.resize(static_cast<size_t>(length));
    out += to_utf8(lower);
  }
  return out;
}

// What uregex_setTimeLimit() takes, which is in units of about 10,000 steps,
// not of time: a pattern of a real tokenizer takes some ten steps a character.
int32_t most_steps(size_t characters) {
  return static_cast<int32_t>(200 + characters / 10);
}

Regex::Regex(
    const std::string& pattern, const std::string& place, bool shortcuts)
    : place_(place) {
  if (shortcuts && pattern == kGpt2Pattern) known_ = Known::gpt2;
  if (shortcuts && pattern == kLlama3Pattern) known_ = Known::llama3;
  if (shortcuts && pattern == kQwen2Pattern) known_ = Known::qwen2;
  const std::u16string wide = to_utf16(translate(pattern, place));
  UErrorCode status = U_ZERO_ERROR;
  UParseError where = {};
  // In Ruby ^ and $ match at lines, and only \n ends a line.
  URegularExpression* regex = uregex_open(
      wide.data(), static_cast<int32_t>(wide.size()),
      UREGEX_MULTILINE | UREGEX_UNIX_LINES, &where, &status);
  if (U_FAILURE(status)) {
    throw DataError(
        place + ": the pattern " + pattern +
        " is wrong: " + u_errorName(status));
  }
  compiled_.reset(regex, uregex_close);
}

void Regex::split(std::string_view text, std::vector<Span>& spans) const {
  if (known_ != Known::none) {
    split_words(text, known_, spans);
    return;
  }
  URegularExpression* regex = compiled_.get();
  const std::u16string wide = to_utf16(text);
  UErrorCode status = U_ZERO_ERROR;
  uregex_setTimeLimit(regex, most_steps(wide.size()), &status);
  uregex_setText(
      regex, wide.data(), static_cast<int32_t>(wide.size()), &status);
  size_t at = 0;     // in bytes
  int32_t unit = 0;  // the same position in UTF-16 units
  while (uregex_findNext(regex, &status) && U_SUCCESS(status)) {
    const int32_t begin = uregex_start(regex, 0, &status);
    const int32_t end = uregex_end(regex, 0, &status);
    const size_t gap = utf8_bytes(wide, unit, begin);
    const size_t match = utf8_bytes(wide, begin, end);
    if (gap > 0) spans.push_back({at, at + gap, false});
    at += gap;
    if (match > 0) spans.push_back({at, at + match, true});
    at += match;
    unit = end;
  }
  if (status == U_REGEX_TIME_OUT) {
    throw DataError(format(
        "{}: its pattern takes more than {} thousand steps on a text of {} "
        "bytes; write it without a repetition within another, such as (a+)+",
        place_, 10 * most_steps(wide.size()), text.size()));
  }
  check(
      status, place_ + ": its pattern, on a text of " +
                  std::to_string(text.size()) + " bytes");
  if (at < text.size()) spans.push_back({at, text.size(), false});
}

// --- Well-known patterns, by hand -------------------------------------------

namespace {

enum Class : uint8_t { other, letter, number, space, newline };

constexpr char32_t kCharacters = 0x110000;

/// The class of each character (1.1 MB), computed at the first use.
const uint8_t* class_table() {
  static const std::unique_ptr<const uint8_t[]> table = [] {
    auto classes = std::make_unique<uint8_t[]>(kCharacters);
    for (char32_t c = 0; c < kCharacters; ++c) {
      if (is_letter(c)) {
        classes[c] = letter;
      } else if (is_number(c)) {
        classes[c] = number;
      } else if (is_space(c)) {
        classes[c] = c == '\n' || c == '\r' ? newline : space;
      }
    }
    return classes;
  }();
  return table.get();
}

class Splitter {
 public:
  Splitter(std::string_view text, Regex::Known known)
      : text_(text),
        classes_(class_table()),
        modern_(known != Regex::Known::gpt2),
        digits_(known == Regex::Known::qwen2 ? 1 : 3) {}

  void run(std::vector<Span>& spans) const {
    for (size_t at = 0; at < text_.size();) {
      const size_t end = modern_ ? modern_word(at) : gpt2_word(at);
      spans.push_back({at, end, true});
      at = end;
    }
  }

 private:
  /// The class of the character at `at`; sets `next` to the following one. At
  /// the end the class is `other` and next == at.
  Class class_at(size_t at, size_t& next) const {
    next = at;
    if (at == text_.size()) return other;
    const auto byte = static_cast<uint8_t>(text_[at]);
    if (byte < 0x80) {
      next = at + 1;
      return static_cast<Class>(classes_[byte]);
    }
    return static_cast<Class>(classes_[next_character(text_, next)]);
  }

  template <typename Is>
  size_t run_of(size_t at, Is&& is) const {
    size_t next = at;
    while (is(class_at(at, next)) && next > at) at = next;
    return at;
  }
  static bool is_blank(Class c) { return c == space || c == newline; }

  char lower_at(size_t at) const {
    if (at >= text_.size()) return '\0';
    const char c = text_[at];
    return modern_ && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  }

  /// The end of a contraction ('s 't 're 've 'm 'll 'd), or `at`.
  size_t contraction(size_t at) const {
    if (text_[at] != '\'') return at;
    const char first = lower_at(at + 1);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') {
      return at + 2;
    }
    const char second = lower_at(at + 2);
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l')) {
      return at + 3;
    }
    // The long s matches s when case is ignored.
    return modern_ && text_.substr(at + 1, 2) == "\xc5\xbf" ? at + 3 : at;
  }

  /// The end of the white space at `at`, without its last character when a word
  /// follows.
  size_t blanks(size_t at) const {
    size_t end = at, last = at, next = at;
    while (is_blank(class_at(end, next)) && next > end) {
      last = end;
      end = next;
    }
    return end == text_.size() || last == at ? end : last;
  }

  size_t gpt2_word(size_t at) const {
    if (const size_t end = contraction(at); end > at) return end;
    const size_t word = text_[at] == ' ' ? at + 1 : at;
    size_t next = word;
    const Class first = class_at(word, next);
    if (next > word && !is_blank(first)) {
      return run_of(next, [&](Class c) { return c == first; });
    }
    return blanks(at);
  }

  size_t modern_word(size_t at) const {
    if (const size_t end = contraction(at); end > at) return end;
    size_t second = at;
    const Class first = class_at(at, second);
    const auto is_letter = [](Class c) { return c == letter; };
    if (first == letter) return run_of(second, is_letter);
    if (first != number && first != newline) {
      const size_t end = run_of(second, is_letter);
      if (end > second) return end;
    }
    if (first == number) {
      size_t end = second, next = second;
      for (int i = 1; i < digits_; ++i) {
        if (class_at(end, next) != number || next == end) break;
        end = next;
      }
      return end;
    }
    const size_t word = text_[at] == ' ' ? at + 1 : at;
    size_t next = word;
    if (class_at(word, next) == other && next > word) {
      const size_t end = run_of(next, [](Class c) { return c == other; });
      return run_of(end, [](Class c) { return c == newline; });
    }
    return lines(at);
  }

  /// The end of the last line break of the white space at `at`; without a line
  /// break as blanks().
  size_t lines(size_t at) const {
    size_t end = at, line = at, next = at;
    while (true) {
      const Class c = class_at(end, next);
      if (next == end || !is_blank(c)) break;
      end = next;
      if (c == newline) line = end;
    }
    return line > at ? line : blanks(at);
  }

  std::string_view text_;
  const uint8_t* classes_;
  bool modern_;
  int digits_;
};

}  // namespace

void split_words(
    std::string_view text, Regex::Known known, std::vector<Span>& spans) {
  Splitter(text, known).run(spans);
}

}  // namespace echelon::detail
