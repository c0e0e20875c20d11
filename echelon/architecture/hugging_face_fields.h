// The fields of a Hugging Face config.json, read with errors that say which one
// is wrong. For the .cpp files of this folder.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "echelon/architecture/hugging_face_config.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::hugging_face {

using nlohmann::json;

/// No number of a model is larger.
inline constexpr int64_t kMostCount = int64_t{1} << 24;

/// The members of one object; `place` names it in errors. `known` begins the
/// rule that a flag of the wrong value breaks.
class Fields {
 public:
  Fields(const json& object, std::string place, const char* known = "known is")
      : object_(object), place_(std::move(place)), known_(known) {}

  [[noreturn]] void
  refuse(const std::string& key, const std::string& rule) const {
    std::string value = "is missing";
    if (const auto found = object_.find(key); found != object_.end()) {
      value = found->dump();
      if (value.size() > 60) value = value.substr(0, 57) + "...";
    }
    throw DataError(format("{}: \"{}\": {}; {}", place_, key, value, rule));
  }

  bool has(const std::string& key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }

  /// Also where it is null.
  bool is_there(const std::string& key) const { return object_.contains(key); }

  int64_t count(const std::string& key) const { return whole(key, 1); }
  int64_t count(const std::string& key, int64_t otherwise) const {
    return has(key) ? whole(key, 1) : otherwise;
  }
  /// 0 or more.
  int64_t number(const std::string& key, int64_t otherwise) const {
    return has(key) ? whole(key, 0) : otherwise;
  }
  /// The first of two spellings that is there.
  int64_t count_of(const std::string& key, const std::string& other) const {
    return has(key) ? count(key) : count(other);
  }

  double real(const std::string& key, double otherwise) const {
    if (!has(key)) return otherwise;
    const json& value = object_.at(key);
    if (!value.is_number() || value.get<double>() < 0) {
      refuse(key, "must be a number, 0 or more");
    }
    return value.get<double>();
  }

  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!object_.at(key).is_boolean()) refuse(key, "must be true or false");
    return object_.at(key).get<bool>();
  }

  void need(const std::string& key, bool value) const {
    if (flag(key, value) == value) return;
    refuse(key, format("{} {} alone", known_, value));
  }

  std::string text(const std::string& key) const {
    if (!has(key) || !object_.at(key).is_string())
      refuse(key, "must be a string");
    return object_.at(key).get<std::string>();
  }
  std::string text(const std::string& key, const char* otherwise) const {
    return has(key) ? text(key) : otherwise;
  }

  const json& list(const std::string& key) const {
    if (!object_.at(key).is_array()) refuse(key, "must be a list");
    return object_.at(key);
  }

  Fields object(const std::string& key) const {
    if (!object_.at(key).is_object()) refuse(key, "must be an object");
    return {object_.at(key), format("{}: \"{}\"", place_, key)};
  }

 private:
  int64_t whole(const std::string& key, int64_t least) const {
    const auto found = object_.find(key);
    const bool fits = found != object_.end() && found->is_number_integer() &&
                      (!found->is_number_unsigned() ||
                       found->get<uint64_t>() <= uint64_t{kMostCount}) &&
                      found->get<int64_t>() >= least &&
                      found->get<int64_t>() <= kMostCount;
    if (fits) return found->get<int64_t>();
    refuse(
        key, format("must be a whole number from {} to {}", least, kMostCount));
  }

  const json& object_;
  std::string place_;
  const char* known_;
};

/// The object in the text of a file, which errors call `name`. Throws
/// DataError for other text, and for more than 4 MiB.
json parse_object(std::string_view text, const std::string& name);

/// The tokens of the longest sequence, by the name that most families have.
int64_t context(const Fields& fields);

/// The shape of a model of this "model_type", which parse_shape() knows.
ConfigShape read_shape(std::string_view type, const Fields& fields);

}  // namespace echelon::hugging_face
