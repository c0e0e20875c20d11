// Binding: which field of an options struct each key of a table sets, and what
// the field may hold.
//
//   void bind(config::Section& section, TrainOptions& options) {
//     section.field("steps", options.steps, "optimizer steps").at_least(0);
//   }
//
// A wrong value does not throw: it is kept as a problem, so that one run finds
// several; Document::finish throws. The field then keeps its default.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "echelon/config/document.h"

namespace echelon::config {

/// One bound field, on which rules are put. Lives as long as the statement.
/// Rules about numbers hold for each item of a list.
class Field {
 public:
  Field& at_least(double lowest);
  Field& at_most(double highest);
  Field& above(double bound);
  Field& below(double bound);
  /// Strings. The error names the nearest choice.
  Field& one_of(const std::vector<std::string>& choices);
  /// Lists: how many items.
  Field& length(size_t smallest, size_t largest);
  Field& not_empty();
  /// Any other rule: called with the target set; returns "" or the rule that
  /// the value breaks, with the way out.
  Field& rule(const std::function<std::string()>& broken);
  /// Another name of the same key; setting both is an error.
  Field& also(const std::string& other_key);

 private:
  friend class Section;
  template <class T>
  Field(Document& document, Entry& entry, T& target);

  void read(const std::string& key);
  std::string bound_text(double bound) const;
  void require(bool holds, const std::string& rule, const std::string& way_out);
  void
  refuse(const Place& place, const std::string& value, const std::string& rule);

  Document& document_;
  Entry& entry_;
  std::function<std::string(const Value&)> set_;  // "" or the broken rule
  std::function<std::string()> text_;
  std::function<std::vector<double>()> numbers_;
  std::function<size_t()> size_;
  std::string written_;  // the value, as its author spelled it
  bool failed_ = false;
};

class Section {
 public:
  Field field(const std::string& key, bool& target, const std::string& help);
  Field field(const std::string& key, int64_t& target, const std::string& help);
  Field
  field(const std::string& key, uint64_t& target, const std::string& help);
  Field field(const std::string& key, double& target, const std::string& help);
  Field
  field(const std::string& key, std::string& target, const std::string& help);
  Field field(
      const std::string& key, std::vector<int64_t>& target,
      const std::string& help);
  Field field(
      const std::string& key, std::vector<double>& target,
      const std::string& help);
  Field field(
      const std::string& key, std::vector<std::string>& target,
      const std::string& help);
  /// "500ms", "30s", "10m", "2h", or a number of seconds.
  Field field(
      const std::string& key, std::chrono::milliseconds& target,
      const std::string& help);

  /// An enum, by its values' names.
  template <class Enum>
  void field(
      const std::string& key, Enum& target, const std::string& help,
      std::initializer_list<std::pair<const char*, Enum>> names) {
    std::vector<std::string> words;
    std::string word;
    for (const auto& [name, value] : names) {
      words.push_back(name);
      if (value == target) word = name;
    }
    choice(key, word, words, help);
    for (const auto& [name, value] : names) {
      if (word == name) target = value;
    }
  }

 private:
  friend class Document;
  Section(Document& document, std::string table)
      : document_(document), table_(std::move(table)) {}

  template <class T>
  Field make(
      const std::string& key, T& target, const std::string& help,
      const std::string& type);
  void choice(
      const std::string& key, std::string& word,
      const std::vector<std::string>& words, const std::string& help);

  Document& document_;
  std::string table_;
};

}  // namespace echelon::config
