// The only file that includes toml++.
#define TOML_EXCEPTIONS 0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include <algorithm>
#include <functional>
#include <sstream>

#include "echelon/config/value.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::config {
namespace {

Place place_of(const toml::source_region& region, const std::string& file) {
  return {
      file, static_cast<int>(region.begin.line),
      static_cast<int>(region.begin.column), ""};
}

Value convert(const toml::node& node, const std::string& file) {
  Value value;
  if (const auto* b = node.as_boolean()) {
    value = Value(b->get());
  } else if (const auto* i = node.as_integer()) {
    value = Value(i->get());
  } else if (const auto* d = node.as_floating_point()) {
    value.kind = Value::Kind::real;
    value.real = d->get();
  } else if (const auto* s = node.as_string()) {
    value = Value(s->get());
  } else if (const auto* a = node.as_array()) {
    value.kind = Value::Kind::array;
    for (const auto& item : *a) value.items.push_back(convert(item, file));
  } else if (const auto* t = node.as_table()) {
    value.kind = Value::Kind::table;
    for (const auto& [key, item] : *t) {
      value.members.push_back(
          {std::string(key.str()), place_of(key.source(), file),
           convert(item, file)});
    }
  } else {
    value.kind = Value::Kind::time;
    std::ostringstream text;
    if (const auto* date = node.as_date()) text << date->get();
    if (const auto* time = node.as_time()) text << time->get();
    if (const auto* both = node.as_date_time()) text << both->get();
    value.string = text.str();
  }
  value.place = place_of(node.source(), file);
  return value;
}

// "Error while parsing string: no closing quote" -> "string: no closing quote",
// on one line.
std::string reason(const toml::parse_error& error) {
  std::string text(error.description());
  std::ranges::replace_if(
      text, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  const std::string prefix = "Error while parsing ";
  if (text.starts_with(prefix)) text = text.substr(prefix.size());
  return text;
}

std::string line_of(std::string_view text, size_t line) {
  size_t begin = 0;
  for (size_t i = 1; i < line && begin < text.size(); ++i) {
    begin = std::min(text.find('\n', begin), text.size() - 1) + 1;
  }
  return std::string(text.substr(begin, text.find('\n', begin) - begin));
}

std::string way_out(std::string_view text, const toml::parse_error& error) {
  const std::string description(error.description());
  if (description.find("could not determine value type") != std::string::npos) {
    const std::string line = line_of(text, error.source().begin.line);
    std::string rest = line.substr(
        std::min<size_t>(error.source().begin.column - 1, line.size()));
    while (!rest.empty() &&
           std::isspace(static_cast<unsigned char>(rest.back()))) {
      rest.pop_back();
    }
    return "a string needs quotes: " + toml_text(shortened(rest));
  }
  if (description.find("utf-8") != std::string::npos) {
    return "save the file as UTF-8 text";
  }
  if (description.find("control characters") != std::string::npos) {
    return "is the closing quote missing?";
  }
  if (description.find("boolean") != std::string::npos) {
    return "write true or false, in small letters";
  }
  return "correct the line";
}

[[noreturn]] void fail(
    std::string_view text, const std::string& file,
    const toml::parse_error& error) {
  const Place place = place_of(error.source(), file);
  const std::string why = reason(error);
  const size_t quote = why.find('\'');
  if (why.find("cannot redefine") != std::string::npos &&
      quote != std::string::npos) {
    const std::string name = why.substr(quote + 1, why.rfind('\'') - quote - 1);
    const bool table = why.find("table header") != std::string::npos;
    throw ConfigError(format(
        "{}: {} is given twice; keep one of the two{}", place.text(),
        table ? "[" + name + "]" : name,
        table ? " and put all of its keys there" : ""));
  }
  throw ConfigError(format(
      "{}: not TOML: {}; {}", place.text(), shortened(why, 160),
      way_out(text, error)));
}

// The place behind the string that begins at `begin`. A string that is not
// closed ends with its line, and one of three quotes with the text.
size_t end_of_string(std::string_view text, size_t begin) {
  const std::string quote(1, text[begin]);
  const std::string three = quote + quote + quote;
  if (text.substr(begin).starts_with(three)) {
    const size_t end = text.find(three, begin + 3);
    return end == text.npos ? text.size() : end + 3;
  }
  size_t at = begin + 1;
  for (; at < text.size() && text[at] != text[begin]; ++at) {
    if (text[at] == '\n') return at;
    if (text[at] == '\\' && text[begin] == '"') ++at;
  }
  return std::min(at + 1, text.size());
}

// The parser nests a table for each part of a dotted key, and destroys them by
// recursion: a key of 50,000 parts overflows the stack. `place` of a line names
// it in the error.
void check_dotted_keys(
    std::string_view text,
    const std::function<std::string(int64_t line)>& place) {
  constexpr int kMostParts = 100;
  int parts = 1;
  int64_t line = 1;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '"' || c == '\'') {
      const size_t end = end_of_string(text, at);
      line += std::ranges::count(text.substr(at, end - at), '\n');
      at = end;
      continue;
    }
    if (c == '#') at = std::min(text.find('\n', at), text.size() - 1);
    if (text[at] == '\n') ++line;
    if (c == '.') {
      ++parts;
    } else if (
        !std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-' &&
        c != ' ' && c != '\t') {
      parts = 1;
    }
    if (parts > kMostParts) {
      throw ConfigError(format(
          "{}: a key of more than {} parts; write fewer dots", place(line),
          kMostParts));
    }
    ++at;
  }
}

toml::table parse_root(std::string_view text, const std::string& file) {
  check_dotted_keys(
      text, [&](int64_t line) { return format("{}:{}", file, line); });
  toml::parse_result result = toml::parse(text, std::string_view(file));
  if (!result) fail(text, file, result.error());
  return std::move(result).table();
}

}  // namespace

Tables parse_toml(std::string_view text, const std::string& file) {
  const toml::table root = parse_root(text, file);
  Tables tables;
  for (const auto& [name, node] : root) {
    const std::string key(name.str());
    const Place place = place_of(name.source(), file);
    const auto* table = node.as_table();
    if (table == nullptr) {
      tables[""].keys[key] = {convert(node, file), place};
      continue;
    }
    Table& made = tables[key];
    made.place = place_of(table->source(), file);
    for (const auto& [inner, value] : *table) {
      made.keys[std::string(inner.str())] = {
          convert(value, file), place_of(inner.source(), file)};
    }
  }
  return tables;
}

Value parse_nested_toml(std::string_view text, const std::string& file) {
  return convert(parse_root(text, file), file);
}

Value parse_value(std::string_view text, const std::string& flag) {
  const std::string line = "v = " + std::string(text);
  check_dotted_keys(line, [&](int64_t) { return flag; });
  const toml::parse_result result = toml::parse(line, std::string_view(flag));
  if (result && result.table().size() == 1) {
    return convert(*result.table().get("v"), "");
  }
  if (text.starts_with('[') || text.starts_with('"')) {
    throw ConfigError(
        flag + ": " + std::string(text) +
        " is not a TOML value; quote it for the shell, as in --set "
        "'data.shape=[1, 8, 8]'");
  }
  return Value(std::string(text));
}

}  // namespace echelon::config
