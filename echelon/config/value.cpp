#include "echelon/config/value.h"

#include <charconv>
#include <cmath>
#include <utility>

#include "echelon/text/format.h"

namespace echelon::config {

std::string Place::text() const {
  if (!flag.empty()) return flag;
  if (file.empty()) return "default";
  if (line == 0) return file;
  return format("{}:{}:{}", file, line, column);
}

std::string Place::short_text() const {
  if (!flag.empty() || file.empty() || line == 0) return text();
  return format("{}:{}", file, line);
}

std::string toml_text(bool value) {
  return value ? "true" : "false";
}

std::string toml_text(int64_t value) {
  return std::to_string(value);
}

std::string toml_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string toml_text(std::string_view value) {
  std::string text = "\"";
  for (char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (c == '\n') {
      text += "\\n";
    } else if (c == '\t') {
      text += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      constexpr char kHex[] = "0123456789ABCDEF";
      text += std::string("\\u00") + kHex[byte >> 4] + kHex[byte & 15];
    } else {
      text += c;
    }
  }
  return text + "\"";
}

Value::Value(bool value) : kind(Kind::boolean), boolean(value) {}

Value::Value(int64_t value) : kind(Kind::integer), integer(value) {}

Value::Value(std::string value)
    : kind(Kind::string), string(std::move(value)) {}

Value::Value(const std::vector<std::string>& values) : kind(Kind::array) {
  for (const auto& value : values) items.emplace_back(value);
}

std::string Value::text() const {
  switch (kind) {
    case Kind::boolean:
      return toml_text(boolean);
    case Kind::integer:
      return toml_text(integer);
    case Kind::real:
      return toml_text(real);
    case Kind::string:
      return toml_text(string);
    case Kind::time:
      return string;
    case Kind::table:
      return "{…}";
    case Kind::array:
      break;
  }
  return "[" + join(items, ", ", &Value::text) + "]";
}

std::string Value::kind_name() const {
  constexpr const char* kNames[] = {
      "true or false", "a whole number", "a number",      "a string",
      "a list",        "a table",        "a date or time"};
  return kNames[static_cast<size_t>(kind)];
}

std::string shortened(const std::string& text, size_t size) {
  if (text.size() <= size) return text;
  // Splits between characters: bytes 10xxxxxx continue a UTF-8 character.
  const auto continues = [&](size_t i) { return (text[i] & 0xC0) == 0x80; };
  size_t head = size * 2 / 3;
  size_t tail = text.size() - (size - head - 3);
  while (head > 0 && continues(head)) --head;
  while (tail < text.size() && continues(tail)) ++tail;
  return text.substr(0, head) + "…" + text.substr(tail);
}

}  // namespace echelon::config
