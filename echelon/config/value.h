// A value as TOML has it, and where it was written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace echelon::config {

/// The place where a value was set: a file's line or a flag.
struct Place {
  std::string file;  // empty: not from a file
  int line = 0;      // from 1
  int column = 0;    // from 1
  std::string flag;  // "--set train.steps=5", "--overwrite"

  bool is_default() const { return file.empty() && flag.empty(); }
  /// "first.toml:3:9", the flag, or "default".
  std::string text() const;
  /// The same without the column: "first.toml:3".
  std::string short_text() const;
};

struct Member;

struct Value {
  enum class Kind { boolean, integer, real, string, array, table, time };

  Value() = default;
  explicit Value(bool value);
  explicit Value(int64_t value);
  explicit Value(std::string value);
  explicit Value(const std::vector<std::string>& values);

  Kind kind = Kind::boolean;
  bool boolean = false;
  int64_t integer = 0;
  double real = 0;
  std::string string;  // string, or time as written
  std::vector<Value> items;
  std::vector<Member> members;  // of a table, by name
  Place place;

  /// The value as TOML spells it.
  std::string text() const;
  /// "a whole number", "a string", "a list" …
  std::string kind_name() const;
};

/// A key of a table inside a value, with what it holds.
struct Member {
  std::string name;
  Place place;  // of the key
  Value value;
};

struct Key {
  Value value;
  Place place;  // of the key itself
};

struct Table {
  std::map<std::string, Key> keys;
  Place place;
};

/// Tables by name; keys before any table are in tables[""].
using Tables = std::map<std::string, Table>;

/// Reads TOML. Throws ConfigError with `file`, line and column when the text is
/// not TOML, a key is given twice, or a table contains a table.
Tables parse_toml(std::string_view text, const std::string& file);

/// The whole text as one table, for files whose tables contain tables. Throws
/// as parse_toml does otherwise.
Value parse_nested_toml(std::string_view text, const std::string& file);

/// One value as --set takes it: TOML, or else a bare string.
Value parse_value(std::string_view text, const std::string& flag);

/// Spells values as TOML; reading the text gives back the identical value.
std::string toml_text(bool value);
std::string toml_text(int64_t value);
std::string toml_text(double value);
std::string toml_text(std::string_view value);

/// At most `size` bytes, the middle replaced by "…".
std::string shortened(const std::string& text, size_t size = 60);

}  // namespace echelon::config
