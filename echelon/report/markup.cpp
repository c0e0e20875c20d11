#include "echelon/report/markup.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

namespace echelon {
namespace {

// Length of the UTF-8 sequence at `text`, 0 when it is none. Overlong forms,
// surrogates and values beyond U+10FFFF are none.
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

}  // namespace

std::string escape_markup(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = sequence_length(text);
    const char c = text.front();
    if (length == 0 || (length == 1 && forbidden(c))) {
      result += "\xef\xbf\xbd";
    } else if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '"') {
      result += "&quot;";
    } else if (c == '\'') {
      result += "&#39;";
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

std::string coordinate(double value, int digits) {
  if (!std::isfinite(value)) return "0";
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, value);
  std::string text = buffer;
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text == "-0" ? "0" : text;
}

void Markup::start(std::string_view tag, Attributes attributes) {
  text_ += '<';
  text_ += tag;
  for (const auto& [name, value] : attributes) {
    text_ += ' ';
    text_ += name;
    text_ += "=\"";
    text_ += escape_markup(value);
    text_ += '"';
  }
}

Markup& Markup::open(std::string_view tag, Attributes attributes) {
  start(tag, attributes);
  text_ += '>';
  open_.emplace_back(tag);
  return *this;
}

Markup& Markup::close() {
  if (open_.empty()) throw std::logic_error("no element is open");
  text_ += "</" + open_.back() + ">";
  open_.pop_back();
  return *this;
}

Markup& Markup::text(std::string_view text) {
  text_ += escape_markup(text);
  return *this;
}

Markup& Markup::leaf(
    std::string_view tag, Attributes attributes, std::string_view text) {
  return open(tag, attributes).text(text).close();
}

Markup& Markup::empty(std::string_view tag, Attributes attributes) {
  start(tag, attributes);
  text_ += "/>";
  return *this;
}

Markup& Markup::raw(std::string_view markup) {
  text_ += markup;
  return *this;
}

std::string Markup::finish() && {
  if (!open_.empty()) {
    throw std::logic_error("element left open: " + open_.back());
  }
  return std::move(text_);
}

}  // namespace echelon
