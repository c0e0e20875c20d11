#include "echelon/report/markup.h"

#include <cmath>
#include <cstdint>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/check.h"

namespace echelon::report {
namespace {

// Length of the UTF-8 sequence that `text` begins with, 0 when it is not valid:
// overlong forms, surrogates and values beyond U+10FFFF are not.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const uint8_t next = byte(1);
  if ((lead == 0xe0 && next < 0xa0) || (lead == 0xed && next >= 0xa0) ||
      (lead == 0xf0 && next < 0x90) || (lead == 0xf4 && next >= 0x90)) {
    return 0;
  }
  return length;
}

bool forbidden(char c) {
  const auto byte = static_cast<uint8_t>(c);
  return byte == 0x7f || (byte < 0x20 && c != '\t' && c != '\n' && c != '\r');
}

const char* entity_of(char c) {
  constexpr std::pair<char, const char*> kEntities[] = {
      {'&', "&amp;"},
      {'<', "&lt;"},
      {'>', "&gt;"},
      {'"', "&quot;"},
      {'\'', "&#39;"}};
  for (const auto& [character, entity] : kEntities) {
    if (c == character) return entity;
  }
  return nullptr;
}

std::string to_text(const detail::FormatArgument& argument) {
  using Kind = detail::FormatArgument::Kind;
  switch (argument.kind) {
    case Kind::integer:
      return std::to_string(argument.integer);
    case Kind::number:
      return std::to_string(argument.number);
    case Kind::real:
      return coordinate(argument.real);
    case Kind::text:
      return escape_markup(argument.text);
    default:
      throw InternalError("a template's argument is no text and no number");
  }
}

}  // namespace

std::string escape_markup(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = sequence_length(text);
    const char c = text.front();
    if (length == 0 || (length == 1 && forbidden(c))) {
      result += "\xef\xbf\xbd";
    } else if (const char* entity = entity_of(c)) {
      result += entity;
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

std::string coordinate(double value, int digits) {
  if (!std::isfinite(value)) return "0";
  std::string text = format("{:.{}f}", value, digits);
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text == "-0" ? "0" : text;
}

// `tag` is what stands between < and >.
void Markup::follow_tag(std::string_view tag) {
  if (tag.ends_with('/')) return;
  if (!tag.starts_with('/')) {
    open_.emplace_back(tag.substr(0, tag.find(' ')));
    return;
  }
  ECHELON_CHECK(
      !open_.empty() && open_.back() == tag.substr(1), "<{}> closes {}", tag,
      open_.empty() ? "nothing" : open_.back());
  open_.pop_back();
}

Markup& Markup::add_template(
    std::string_view pattern,
    std::initializer_list<detail::FormatArgument> arguments) {
  const auto* argument = arguments.begin();
  size_t tag = std::string_view::npos;  // where the tag began, while in one
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const bool in_tag = tag != std::string_view::npos;
    if (c == '{') {
      text_ += to_text(*argument++);
      ++i;
      continue;
    }
    if (c == '<') tag = i + 1;
    if (c == '>' && in_tag) {
      follow_tag(pattern.substr(tag, i - tag));
      tag = std::string_view::npos;
    }
    text_ += in_tag && c == '\'' ? '"' : c;
  }
  return *this;
}

Markup& Markup::add_json(std::string_view json) {
  text_ += "<script type=\"application/json\">";
  for (const char c : json) {  // "</script>" must not end it
    text_ += c == '<' ? std::string_view("\\u003c") : std::string_view(&c, 1);
  }
  text_ += "</script>";
  return *this;
}

std::string Markup::finish() && {
  ECHELON_CHECK(open_.empty(), "<{}> is left open", open_.back());
  return std::move(text_);
}

}  // namespace echelon::report
