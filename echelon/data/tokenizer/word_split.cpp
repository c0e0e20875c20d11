#include <algorithm>
#include <cstdint>
#include <memory>

#include "echelon/data/tokenizer/unicode.h"

namespace echelon::detail {
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
