// Formatting of text, the one door to the fmt library, and what lists and names
// look like in messages:
//
//   throw ConfigError(format("[layout] dp={} * tp={}, but {} ranks", dp, tp,
//   n));
//
// "{}" takes the next argument, "{:.1f}" formats it as std::format does, "{{"
// is a brace. A floating-point number without a specification prints in the
// fewest digits that read back as the same value. fmt itself is included by
// format.cpp alone: its headers take seconds to compile.
#pragma once

#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace echelon {

namespace detail {

/// One argument, whatever its type was. Strings are borrowed.
class FormatArgument {
 public:
  enum class Kind { boolean, character, integer, number, real, text };

  FormatArgument(bool value) : kind(Kind::boolean), integer(value) {}
  FormatArgument(char value) : kind(Kind::character), integer(value) {}
  template <std::signed_integral T>
  FormatArgument(T value) : kind(Kind::integer), integer(value) {}
  template <std::unsigned_integral T>
  FormatArgument(T value) : kind(Kind::number), number(value) {}
  FormatArgument(double value) : kind(Kind::real), real(value) {}
  FormatArgument(const char* value) : kind(Kind::text), text(value) {}
  FormatArgument(std::string_view value) : kind(Kind::text), text(value) {}
  FormatArgument(const std::string& value) : kind(Kind::text), text(value) {}

  Kind kind;
  union {
    int64_t integer;
    uint64_t number;
    double real;
  };
  std::string_view text;
};

std::string format_arguments(
    std::string_view pattern, std::initializer_list<FormatArgument> arguments);

/// A pattern that takes `Count` arguments: another number does not compile.
template <size_t Count>
struct FormatPattern {
  template <size_t Size>
  consteval FormatPattern(const char (&pattern)[Size])
      : text(pattern, Size - 1) {
    size_t fields = 0;
    for (size_t i = 0; i + 1 < Size; ++i) {
      if (pattern[i] == '{' && pattern[i + 1] == '{') {
        ++i;
      } else if (pattern[i] == '{') {
        ++fields;
      }
    }
    if (fields != Count) throw "the pattern takes another number of arguments";
  }
  std::string_view text;
};

}  // namespace detail

/// The pattern with each "{}" replaced by an argument.
template <typename... Arguments>
std::string format(
    std::type_identity_t<detail::FormatPattern<sizeof...(Arguments)>> pattern,
    const Arguments&... arguments) {
  return detail::format_arguments(
      pattern.text, {detail::FormatArgument(arguments)...});
}

/// The elements with `separator` between each two: join(names, ", "). Numbers
/// are formatted as "{}" formats them. `projection` gives what is printed of an
/// element: join(layers, ", ", &Layer::name).
template <class Range, class Projection = std::identity>
std::string join(
    const Range& range, std::string_view separator,
    const Projection& projection = {}) {
  std::string text;
  bool first = true;
  for (const auto& element : range) {
    if (!first) text += separator;
    first = false;
    text += format("{}", std::invoke(projection, element));
  }
  return text;
}

/// The text between double quotes, for names in messages; nothing is escaped.
/// (Not "quoted": argument-dependent lookup would find std::quoted.)
inline std::string in_quotes(std::string_view text) {
  return format("\"{}\"", text);
}

/// Why a text is no JSON, or not the JSON that was expected: the text of the
/// library's error without its own "[json.exception.parse_error.101] ".
std::string json_reason(const std::exception& error);

}  // namespace echelon
