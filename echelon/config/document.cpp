// tables_ is what the file and the overrides say, entries_ what the program has
// bound, in that order; finish() compares the two, so that a key is unknown
// when no bind() asked for it. Problems are collected, not thrown, and come out
// sorted by their place, those of flags last. An unknown key is looked for in
// turn among other programs' names, the keys of other tables, and similar
// spellings.
#include "echelon/config/document.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ranges>
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

// "[train] steps", or "train.steps" as a flag has it.
std::string
spelled(std::string_view table, std::string_view key, bool in_flag) {
  return in_flag ? format("{}.{}", table, key) : format("[{}] {}", table, key);
}

// Letter case and - against _ do not count.
bool same_name(std::string_view a, std::string_view b) {
  const auto letter = [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte == '-' ? '_' : static_cast<char>(std::tolower(byte));
  };
  return std::ranges::equal(a, b, {}, letter, letter);
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
  std::string_view place = assignment.substr(0, equals);
  place.remove_prefix(std::min(place.find_first_not_of(' '), place.size()));
  place = place.substr(0, place.find_last_not_of(' ') + 1);
  const size_t dot = place.find('.');
  if (equals == std::string_view::npos || place.empty() ||
      place.starts_with('.') || place.ends_with('.')) {
    throw ConfigError(
        flag +
        ": must be TABLE.KEY=VALUE; write for example --set train.steps=100");
  }
  // A key without a table is refused by finish(), which knows the tables.
  const bool has_table = dot != std::string_view::npos;
  set(std::string(has_table ? place.substr(0, dot) : ""),
      std::string(has_table ? place.substr(dot + 1) : place),
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

const Value*
Document::value(const std::string& table, const std::string& key) const {
  const Key* found = find(table, key);
  return found == nullptr ? nullptr : &found->value;
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

const OtherNames*
Document::other_name(std::string_view name, bool of_table) const {
  for (const auto& row : other_names_) {
    const bool is_table =
        !row.key.empty() && row.key.find('.') == std::string_view::npos;
    if (is_table != of_table) continue;
    for (const auto word : std::views::split(row.names, ' ')) {
      if (same_name(name, std::string_view(word.begin(), word.end())))
        return &row;
    }
  }
  return nullptr;
}

std::string Document::places_of(const std::string& key, bool in_flag) const {
  std::vector<std::string> places;
  for (const auto& entry : entries_) {
    if (entry.key == key) places.push_back(spelled(entry.table, key, in_flag));
  }
  return join(places, " or ");
}

std::string Document::key_meant(const std::string& name) const {
  std::string found;
  for (const auto& entry : entries_) {
    if (!same_name(entry.key, name)) continue;
    if (!found.empty()) return "";
    found = spelled(entry.table, entry.key, true);
  }
  if (!found.empty()) return found;
  const OtherNames* row = other_name(name, false);
  return row == nullptr ? "" : std::string(row->key);
}

void Document::unknown_table(const std::string& name, const Table& table) {
  std::vector<std::string> names;
  for (const auto& heading : headings_) names.push_back(heading.name);
  const OtherNames* row = other_name(name, true);
  const std::string guess =
      row != nullptr ? std::string(row->key) : nearest(name, names);
  problem(
      table.place,
      format(
          "{}: [{}]: unknown table; {}", table.place.text(), name,
          guess.empty() ? format("there are [{}]", join(names, "] ["))
                        : format("did you mean [{}]?", guess)));
}

std::string Document::remedy(
    const std::string& table, const std::string& key, bool in_flag) const {
  const OtherNames* row = other_name(table + "." + key, false);
  if (row == nullptr) {
    const std::string places = places_of(key, in_flag);
    if (!places.empty()) return format("did you mean {}?", places);
    row = other_name(key, false);
  }
  if (row != nullptr) {
    if (row->key.empty()) return std::string(row->remark);
    const size_t dot = row->key.find('.');
    const auto owner = row->key.substr(0, dot);
    const auto name = row->key.substr(dot + 1);
    if (owner == table && row->remark.empty()) {
      return format("did you mean \"{}\"?", name);
    }
    return format(
        "did you mean {}{}?", spelled(owner, name, in_flag), row->remark);
  }
  const std::string guess = nearest(key, keys_of(table));
  if (!guess.empty()) return format("did you mean \"{}\"?", guess);
  std::vector<std::string> all;
  for (const auto& entry : entries_) all.push_back(entry.key);
  const std::string elsewhere = nearest(key, all);
  if (!elsewhere.empty()) {
    return format("did you mean {}?", places_of(elsewhere, in_flag));
  }
  return format(
      "`echelon config reference` lists the keys{}",
      table.empty() ? "" : format(" of [{}]", table));
}

void Document::unknown_key(
    const std::string& table, const std::string& key, const Key& found) {
  const std::string value = found.value.text();
  const bool in_flag = !found.place.flag.empty();
  const std::string text = found.place.text();
  const std::string way_out = remedy(table, key, in_flag);
  if (!table.empty()) {
    problem(
        found.place, where_text(found.place, table, key, value) +
                         ": unknown key; " + way_out);
  } else if (in_flag) {
    problem(
        found.place, format("{}: must be TABLE.KEY=VALUE; {}", text, way_out));
  } else {
    problem(
        found.place, format(
                         "{}: {} = {}: stands before any table; {}", text, key,
                         shortened(value), way_out));
  }
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
