#include "echelon/config/document.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <tuple>

#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::config {
namespace {

std::string where_text(
    const Place& place, const std::string& table, const std::string& key,
    const std::string& value) {
  return format("{}: [{}] {} = {}", place.text(), table, key, shortened(value));
}

constexpr size_t kMaxFileBytes = 1 << 20;

}  // namespace

std::string five_lines(const std::vector<std::string>& lines) {
  if (lines.size() <= 5) return join(lines, "\n");
  return join(std::span(lines).first(4), "\n") +
         format("\nand {} more errors", lines.size() - 4);
}

Document Document::parse(std::string_view text, const std::string& name) {
  Document document;
  document.name_ = name;
  document.tables_ = parse_toml(text, name);
  return document;
}

Document Document::read(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::is_directory(status)) {
    throw ConfigError(
        path + ": is a folder; name the configuration file in it");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw ConfigError(format(
        "{}: cannot be read: {}; name a configuration file, as in "
        "examples/configs/digits.toml",
        path, std::strerror(errno)));
  }
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFileBytes) {
    throw ConfigError(
        path + ": is larger than 1 MiB; name a configuration file");
  }
  return parse(text, path);
}

void Document::set(std::string_view assignment) {
  const std::string flag = "--set " + std::string(assignment);
  const size_t equals = assignment.find('=');
  const size_t dot = assignment.substr(0, equals).find('.');
  if (equals == std::string_view::npos || dot == std::string_view::npos ||
      dot == 0 || dot + 1 == equals) {
    throw ConfigError(
        flag +
        ": must be TABLE.KEY=VALUE; write for example --set train.steps=100");
  }
  set(std::string(assignment.substr(0, dot)),
      std::string(assignment.substr(dot + 1, equals - dot - 1)),
      parse_value(assignment.substr(equals + 1), flag), flag);
}

void Document::set(
    const std::string& table, const std::string& key, Value value,
    const std::string& flag) {
  value.place = {"", 0, 0, flag};
  for (auto& item : value.items) item.place = value.place;
  const auto [found, is_new] = tables_.try_emplace(table);
  if (is_new) found->second.place = value.place;
  const Place place = value.place;
  found->second.keys[key] = {std::move(value), place};
}

Section Document::section(const std::string& name, const std::string& help) {
  headings_.push_back({name, help});
  return Section(*this, name);
}

void Document::clear(
    const std::string& table, const std::vector<std::string>& keys) {
  const auto found = tables_.find(table);
  if (found == tables_.end()) return;
  for (const auto& key : keys) found->second.keys.erase(key);
}

bool Document::has_keys(
    const std::string& table, const std::vector<std::string>& keys) const {
  return std::ranges::any_of(
      keys, [&](const auto& key) { return find(table, key) != nullptr; });
}

const Key*
Document::find(const std::string& table, const std::string& key) const {
  const auto found = tables_.find(table);
  if (found == tables_.end()) return nullptr;
  const auto value = found->second.keys.find(key);
  return value == found->second.keys.end() ? nullptr : &value->second;
}

void Document::problem(const Place& place, const std::string& message) {
  problems_.push_back({place, message});
}

std::vector<std::string> Document::keys_of(const std::string& table) const {
  std::vector<std::string> keys;
  for (const auto& entry : entries_) {
    if (entry.table == table) keys.push_back(entry.key);
  }
  return keys;
}

std::string
Document::other_table(const std::string& key, const std::string& not_in) const {
  const auto found = std::ranges::find_if(entries_, [&](const Entry& entry) {
    return entry.key == key && entry.table != not_in;
  });
  return found == entries_.end() ? "" : found->table;
}

void Document::unknown_table(const std::string& name, const Table& table) {
  std::vector<std::string> names;
  for (const auto& heading : headings_) names.push_back(heading.name);
  const std::string guess = nearest(name, names);
  problem(
      table.place,
      format(
          "{}: [{}]: unknown table; {}", table.place.text(), name,
          guess.empty() ? format("there are [{}]", join(names, "] ["))
                        : format("did you mean [{}]?", guess)));
}

void Document::unknown_key(
    const std::string& table, const std::string& key, const Key& found) {
  const std::string value = found.value.text();
  if (table.empty()) {
    const std::string owner = other_table(key, "");
    problem(
        found.place,
        format(
            "{}: {} = {}: stands before any table; put it under {}",
            found.place.text(), key, shortened(value),
            owner.empty() ? "its table's [heading]" : format("[{}]", owner)));
    return;
  }
  std::string message =
      where_text(found.place, table, key, value) + ": unknown key";
  const auto keys = keys_of(table);
  const std::string guess = nearest(key, keys);
  const std::string owner = other_table(key, table);
  if (!owner.empty()) {
    message += "; it belongs in [" + owner + "]";
  } else if (!guess.empty()) {
    message += "; did you mean \"" + guess + "\"?";
  } else {
    message += "; `echelon config reference` lists the keys of [" + table + "]";
  }
  problem(found.place, message);
}

void Document::find_unknown() {
  for (const auto& [name, table] : tables_) {
    const bool known = std::ranges::count(headings_, name, &Heading::name) > 0;
    if (!known && !name.empty()) {
      unknown_table(name, table);
      continue;
    }
    const auto keys = keys_of(name);
    for (const auto& [key, found] : table.keys) {
      if (aliases_.count(name + "." + key) == 0 &&
          std::ranges::find(keys, key) == keys.end()) {
        unknown_key(name, key, found);
      }
    }
  }
}

void Document::finish() {
  find_unknown();
  if (problems_.empty()) return;
  const auto order = [](const Problem& problem) {
    const Place& place = problem.place;
    return std::tuple(!place.flag.empty(), place.line, place.column);
  };
  std::ranges::stable_sort(problems_, {}, order);
  std::vector<std::string> lines;
  for (const auto& problem : problems_) lines.push_back(problem.message);
  throw ConfigError(five_lines(lines));
}

std::string Document::help(const std::string& table) const {
  for (const auto& heading : headings_) {
    if (heading.name == table) return heading.help;
  }
  return "";
}

const Entry& Document::entry(std::string_view key) const {
  for (const auto& entry : entries_) {
    if (entry.table + "." + entry.key == key) return entry;
  }
  throw InternalError(format("no field of the configuration is \"{}\"", key));
}

std::string Document::where(std::string_view key) const {
  const Entry& found = entry(key);
  if (!found.place.is_default()) {
    return where_text(found.place, found.table, found.key, found.value);
  }
  const std::string value =
      format("[{}] {} = {}", found.table, found.key, shortened(found.value));
  return name_.empty() ? value : format("{}: {} (default)", name_, value);
}

std::string Document::to_toml(bool with_help) const {
  std::string text;
  for (const auto& heading : headings_) {
    if (!text.empty()) text += "\n";
    const auto add = [&](const std::string& line, const std::string& help) {
      text += line + (with_help ? "  # " + help : "") + "\n";
    };
    add("[" + heading.name + "]", heading.help);
    for (const auto& entry : entries_) {
      if (entry.table != heading.name) continue;
      add(entry.key + " = " + entry.value, entry.help);
    }
  }
  return text;
}

}  // namespace echelon::config
