// A configuration: tables of keys, who set each value, and what was wrong.
//
//   auto document = Document::read("first.toml");
//   document.set("train.steps=100");
//   auto section = document.section("train", "the loop");
//   bind(section, options);   // reads and checks every field
//   document.finish();        // throws for the first errors and unknown names
//
// Binding options to an empty Document reads nothing, but checks the values and
// records them. A resolved configuration is written that way.
#pragma once

#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/config/value.h"

namespace echelon::config {

class Section;

/// One field as bound, as `config show` and the reference print it.
struct Entry {
  std::string table;
  std::string key;
  std::string type;  // "whole number", "list of numbers" …
  std::string help;
  std::vector<std::string> rules;    // "at least 1"
  std::vector<std::string> choices;  // TOML texts
  std::string default_value;         // TOML text, before reading
  std::string value;                 // TOML text, after reading
  Place place;                       // of the value; default when not set
};

/// Names that other programs have for a table or key. The error of an unknown
/// name then says which key was meant, or why there is none. Letter case and -
/// against _ do not count.
struct OtherNames {
  std::string_view key;     // "train.steps"; "train", a table; "": no such key
  std::string_view remark;  // behind the key: ` = "bf16"`; may be empty
  /// Separated by spaces. "train.schedule" counts in that table alone, even
  /// where another table has a key "schedule".
  std::string_view names;
};

class Document {
 public:
  Document() = default;
  /// Throws ConfigError when the file cannot be read or is not TOML.
  static Document read(const std::string& path);
  static Document parse(std::string_view text, const std::string& name);

  /// An override as the command line has it, "train.steps=100". A later one
  /// wins. Throws ConfigError when it is not TABLE.KEY=VALUE.
  void set(std::string_view assignment);
  /// A flag that stands for a key: set("train", "overwrite", …, "--overwrite").
  void
  set(const std::string& table, const std::string& key, Value value,
      const std::string& flag);

  /// Forgets the values of some keys, as --layout does with the degrees.
  void clear(const std::string& table, const std::vector<std::string>& keys);
  /// True when the file or an override has one of the keys in this table.
  bool has_keys(
      const std::string& table, const std::vector<std::string>& keys) const;

  /// What the file or an override gives a key; null when neither does.
  const Value* value(const std::string& table, const std::string& key) const;

  Section section(const std::string& name, const std::string& help);
  /// The names must outlive the document.
  void also_called(std::span<const OtherNames> names) { other_names_ = names; }

  /// Ends the binding. Throws ConfigError with the first errors, in the order
  /// of the file, at most five lines; unknown tables and keys are errors.
  void finish();

  const std::string& name() const { return name_; }
  /// The meaning of a table, as given to section().
  std::string help(const std::string& table) const;
  const std::deque<Entry>& entries() const { return entries_; }
  /// The field "train.batch"; it must have been bound.
  const Entry& entry(std::string_view key) const;
  /// "train.epochs" for "epochs", "max_epochs" or "max-epochs"; empty when no
  /// key of one table alone is meant.
  std::string key_meant(const std::string& name) const;
  /// `first.toml:3:9: [train] batch = 64`: how an error about it begins.
  std::string where(std::string_view key) const;
  /// Every field as bound, with its table's heading and meaning.
  std::string to_toml(bool with_help = false) const;

 private:
  friend class Section;
  friend class Field;

  struct Problem {
    Place place;
    std::string message;
  };
  struct Heading {
    std::string name;
    std::string help;
  };

  /// Null when the file and the overrides do not have the key.
  const Key* find(const std::string& table, const std::string& key) const;
  void problem(const Place& place, const std::string& message);
  void find_unknown();
  void unknown_table(const std::string& name, const Table& table);
  void unknown_key(
      const std::string& table, const std::string& key, const Key& found);
  /// `did you mean "steps"?` or what else helps with an unknown key.
  std::string
  remedy(const std::string& table, const std::string& key, bool in_flag) const;
  /// The row of other_names_ that has this name of a table or of a key; null:
  /// none.
  const OtherNames* other_name(std::string_view name, bool of_table) const;
  /// "[train] steps", or "train.steps" as a flag has it; all that have the key.
  std::string places_of(const std::string& key, bool in_flag) const;
  std::vector<std::string> keys_of(const std::string& table) const;

  std::string name_;
  Tables tables_;
  std::vector<Heading> headings_;
  std::deque<Entry> entries_;  // a deque: Field keeps references
  std::span<const OtherNames> other_names_;
  std::map<std::string, std::string> aliases_;  // "layout.dp_replicate"
  std::vector<Problem> problems_;
};

/// Joins at most five lines: if there are more, four and "and N more errors".
std::string five_lines(const std::vector<std::string>& lines);

}  // namespace echelon::config
