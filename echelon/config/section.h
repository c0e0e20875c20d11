// Binding: which field of an options struct each key of a table sets, and which
// values the field may hold.
//
//   void bind(config::Section& section, TrainOptions& options) {
//     section.field(
//         "steps", options.steps, "optimizer steps", {.at_least = 0});
//   }
//
// A wrong value does not throw. It is kept as a problem, so that one run finds
// several, and Document::finish throws. The field then keeps its default.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "echelon/config/document.h"

namespace echelon::config {

/// What a number may be, or each item of a list. Times are in seconds.
struct Bounds {
  std::optional<double> at_least, above, at_most, below;
};

/// A number of bytes, or a list of them: "48GiB", "512 MiB", "2GB", or a whole
/// number.
template <class T>
class InBytes {
 public:
  explicit InBytes(T& target) : target_(&target) {}
  const InBytes& get() const { return *this; }
  T& value() const { return *target_; }

 private:
  T* target_;
};
using Bytes = InBytes<int64_t>;
using BytesList = InBytes<std::vector<int64_t>>;

/// The variable that a key sets. Times are "500ms", "30s", "10m", "2h", or a
/// number of seconds.
using Target = std::variant<
    std::reference_wrapper<bool>, std::reference_wrapper<int64_t>,
    std::reference_wrapper<uint64_t>, std::reference_wrapper<double>,
    std::reference_wrapper<std::string>,
    std::reference_wrapper<std::vector<int64_t>>,
    std::reference_wrapper<std::vector<double>>,
    std::reference_wrapper<std::vector<std::string>>,
    std::reference_wrapper<std::chrono::milliseconds>, Bytes, BytesList>;

/// An enum's values, each after its name in a configuration.
template <class Enum>
using Names = std::initializer_list<std::pair<const char*, Enum>>;

/// The name of `value` among all values' names.
template <class Enum>
std::string name_of(Enum value, Names<Enum> names) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return "";
}

/// One bound field, to which rules are added. Lives as long as the statement.
class Field {
 public:
  Field& within(const Bounds& bounds);
  /// Strings. The error names the nearest choice.
  Field& one_of(const std::vector<std::string>& choices);
  /// Lists: how many items.
  Field& length(size_t smallest, size_t largest);
  Field& not_empty();
  /// Any other rule: called with the target set; returns "" or the rule that
  /// the value breaks, with the way out.
  Field& rule(const std::function<std::string()>& broken);
  /// Another name of the same key. Setting both is an error.
  Field& also(const std::string& other_key);

 private:
  friend class Section;
  Field(Document& document, Entry& entry, Target target);

  void read(const std::string& key);
  std::string bound_text(double bound) const;
  void require(bool holds, const std::string& rule, const std::string& way_out);
  void
  refuse(const Place& place, const std::string& value, const std::string& rule);

  Document& document_;
  Entry& entry_;
  Target target_;
  std::string written_;  // the value, as its author spelled it
  bool failed_ = false;
};

class Section {
 public:
  Field field(
      const std::string& key, Target target, const std::string& help,
      const Bounds& bounds = {});

  /// An enum, by its values' names. `unlisted` names are accepted too, but no
  /// list or message shows them.
  template <class Enum>
  requires std::is_enum_v<Enum>
  void field(
      const std::string& key, Enum& target, const std::string& help,
      std::type_identity_t<Names<Enum>> names,
      std::type_identity_t<Names<Enum>> unlisted = {}) {
    std::vector<std::string> words;
    for (const auto& [name, value] : names) words.push_back(name);
    std::string word = name_of(target, names) + name_of(target, unlisted);
    Field choice = field(key, word, help);
    for (const auto& [name, value] : unlisted) {
      if (word == name) {
        target = value;
        return;
      }
    }
    choice.one_of(words);
    for (const auto& [name, value] : names) {
      if (word == name) target = value;
    }
  }

 private:
  friend class Document;
  Section(Document& document, std::string table)
      : document_(document), table_(std::move(table)) {}

  Document& document_;
  std::string table_;
};

}  // namespace echelon::config
