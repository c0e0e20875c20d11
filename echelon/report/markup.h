// Writes HTML and SVG from templates; every argument is escaped.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "echelon/text/format.h"

namespace echelon::report {

/// For text and attribute values: & < > " ' as entities. Bytes that are not
/// UTF-8, and control characters that a page may not hold, become U+FFFD.
std::string escape_markup(std::string_view text);

/// At most `digits` decimals, no trailing zeros: 12.5, 3, -0.25.
std::string coordinate(double value, int digits = 2);

/// A document that grows at its end.
///
///   Markup page;
///   page.add("<p class='note'>{} of {} ranks</p>", shown, ranks);
///
/// A template is trusted and copied as it is, with double quotes for the single
/// ones of its attributes. Each {} takes an argument, which is escaped; a
/// floating-point number is written as coordinate() does.
class Markup {
 public:
  template <typename... Arguments>
  Markup&
  add(std::type_identity_t<detail::FormatPattern<sizeof...(Arguments)>> pattern,
      const Arguments&... arguments) {
    return add_template(pattern.text, {detail::FormatArgument(arguments)...});
  }
  /// A block of data for a script.
  Markup& add_json(std::string_view json);

  /// Throws InternalError when an element is still open. A template that
  /// closes another element than the last one opened throws at once.
  std::string finish() &&;

 private:
  Markup& add_template(
      std::string_view pattern,
      std::initializer_list<detail::FormatArgument> arguments);
  void follow_tag(std::string_view tag);

  std::string text_;
  std::vector<std::string> open_;  // elements, outermost first
};

}  // namespace echelon::report
