// Writes HTML and SVG: elements nested and closed, every text escaped.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace echelon {

/// For text and attribute values: & < > " ' as entities; bytes that are no
/// UTF-8, and control characters that a page may not hold, as U+FFFD.
std::string escape_markup(std::string_view text);

/// At most `digits` decimals, no trailing zeros: 12.5, 3, -0.25.
std::string coordinate(double value, int digits = 2);

/// Grows a document from its outside to its inside.
///
///   Markup page;
///   page.open("p", {{"class", "note"}}).text("a < b").close();
class Markup {
 public:
  using Attributes =
      std::initializer_list<std::pair<std::string_view, std::string>>;

  Markup& open(std::string_view tag, Attributes attributes = {});
  Markup& close();
  Markup& text(std::string_view text);
  /// An element with text alone.
  Markup&
  leaf(std::string_view tag, Attributes attributes, std::string_view text);
  /// An SVG element without content: <rect …/>.
  Markup& empty(std::string_view tag, Attributes attributes);
  /// As it is: a style sheet of ours, or the result of another Markup.
  Markup& raw(std::string_view markup);

  size_t size() const { return text_.size(); }
  /// Throws std::logic_error when an element is still open.
  std::string finish() &&;

 private:
  void start(std::string_view tag, Attributes attributes);

  std::string text_;
  std::vector<std::string> open_;
};

}  // namespace echelon
