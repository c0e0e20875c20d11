// Fields of a JSON object, read strictly: a wrong type, a missing key and an
// unknown key are errors with their place.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::detail {

class Fields {
 public:
  using Json = nlohmann::json;

  /// Messages begin with `place`, as in "tokenizer.json: decoder".
  Fields(const Json& object, std::string place)
      : object_(object), place_(std::move(place)) {
    if (!object_.is_object()) fail("must be an object");
  }

  const std::string& place() const { return place_; }
  std::string place(const std::string& key) const { return place_ + "." + key; }

  [[noreturn]] void fail(const std::string& why) const {
    throw DataError(place_ + ": " + why);
  }

  /// The value of `key`; nullptr when it is missing or null.
  const Json* find(const std::string& key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  const Json& at(const std::string& key) {
    const Json* value = find(key);
    if (value == nullptr) fail("has no \"" + key + "\"");
    return *value;
  }
  const Json& list(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_array()) fail("\"" + key + "\" must be a list");
    return value;
  }
  std::string text(const std::string& key) { return as_text(key, at(key)); }
  std::string text(const std::string& key, const std::string& otherwise) {
    const Json* value = find(key);
    return value == nullptr ? otherwise : as_text(key, *value);
  }
  /// A component for each entry of the list `key`, made by
  /// make(description, place).
  template <typename Component>
  std::vector<Component> components(
      const std::string& key,
      Component (*make)(const Json&, const std::string&)) {
    std::vector<Component> made;
    for (const auto& entry : list(key)) {
      made.push_back(make(entry, format("{}[{}]", place(key), made.size())));
    }
    return made;
  }
  bool flag(const std::string& key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) fail("\"" + key + "\" must be true or false");
    return value->get<bool>();
  }
  /// Ids and counts: 0 to 2^31 - 1.
  int32_t number(const std::string& key) { return as_number(key, at(key)); }

  int32_t as_number(const std::string& what, const Json& value) const {
    if (!value.is_number_integer() || value < 0 || value > 2147483647) {
      fail(format(
          "\"{}\" is {}; it must be a whole number from 0 to 2147483647", what,
          value.dump().substr(0, 40)));
    }
    return value.get<int32_t>();
  }
  std::string as_text(const std::string& what, const Json& value) const {
    if (!value.is_string()) fail("\"" + what + "\" must be a string");
    return value.get<std::string>();
  }

  /// Call this after all known keys have been read.
  void end() const {
    for (const auto& item : object_.items()) {
      if (!known_.contains(item.key())) {
        fail("\"" + item.key() + "\" is not known to this version");
      }
    }
  }

 private:
  const Json& object_;
  std::string place_;
  std::set<std::string> known_;
};

}  // namespace echelon::detail
