#include "echelon/deploy/yaml.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

namespace echelon::deploy {
namespace {

using Json = nlohmann::ordered_json;

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// Whether a string is one without quotes, in YAML 1.1 and 1.2: it begins with a
// letter, and is no word that stands for a truth value or null.
bool is_plain(const std::string& text) {
  constexpr std::array<std::string_view, 9> kWords = {
      "y", "n", "yes", "no", "on", "off", "true", "false", "null"};
  if (text.empty() || !is_letter(text[0])) return false;
  std::string lower = text;
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
  return std::ranges::find(kWords, lower) == kWords.end() &&
         std::ranges::all_of(text, [](char c) {
           return is_letter(c) || (c >= '0' && c <= '9') || c == '-' ||
                  c == '_' || c == '.' || c == '/';
         });
}

// A literal block has no escapes: it cannot hold what is not printed, nor lines
// that end with a space, which readers may cut.
bool is_block(const std::string& text) {
  if (text.size() < 2 || text.back() != '\n' || text.front() == '\n' ||
      text.front() == ' ' || text[text.size() - 2] == '\n') {
    return false;
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    if (c != '\n' && (c < ' ' || c == 127)) return false;
    if (c == ' ' && text[i + 1] == '\n') return false;
  }
  return true;
}

// JSON's strings are strings of YAML, but for characters that JSON writes as
// two escapes.
std::string quoted(const std::string& text) {
  const bool escapes = std::ranges::none_of(
      text, [](char c) { return static_cast<unsigned char>(c) >= 0xF0; });
  return Json(text).dump(-1, ' ', escapes, Json::error_handler_t::replace);
}

std::string scalar(const Json& value, const std::string& indent) {
  if (value.is_object()) return "{}";
  if (value.is_array()) return "[]";
  if (!value.is_string()) return value.dump();
  const auto& text = value.get_ref<const std::string&>();
  if (is_plain(text)) return text;
  if (!is_block(text)) return quoted(text);
  std::string block = "|";
  bool begins = true;
  for (const char c : text) {
    if (begins) block += "\n";
    if (begins && c != '\n') block += indent;
    begins = c == '\n';
    if (!begins) block += c;
  }
  return block;
}

bool is_nested(const Json& value) {
  return (value.is_object() || value.is_array()) && !value.empty();
}

void write(const Json& value, const std::string& indent, std::string& out) {
  if (value.is_array()) {
    for (const Json& item : value) {
      out += indent + "- ";
      if (!is_nested(item)) {
        out += scalar(item, indent + "  ") + "\n";
        continue;
      }
      // Its first line goes behind the dash.
      const size_t begin = out.size();
      write(item, indent + "  ", out);
      out.erase(begin, indent.size() + 2);
    }
    return;
  }
  for (const auto& [key, member] : value.items()) {
    out += indent + (is_plain(key) ? key : quoted(key)) + ":";
    if (is_nested(member)) {
      out += "\n";
      write(member, member.is_array() ? indent : indent + "  ", out);
    } else {
      out += " " + scalar(member, indent + "  ") + "\n";
    }
  }
}

}  // namespace

std::string to_yaml(const Json& value) {
  if (!is_nested(value)) return scalar(value, "  ") + "\n";
  std::string out;
  write(value, "", out);
  return out;
}

}  // namespace echelon::deploy
