#include "echelon/deploy/schemas.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string_view>

#include "echelon/text/check.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::deploy {

// The files of schemas/, which the build embeds.
namespace schemas {
extern const std::string_view ClusterQueue_json;
extern const std::string_view ClusterTrainingRuntime_json;
extern const std::string_view Cohort_json;
extern const std::string_view JobSet_json;
extern const std::string_view LeaderWorkerSet_json;
extern const std::string_view LocalQueue_json;
extern const std::string_view PodMonitor_json;
extern const std::string_view Queue_json;
extern const std::string_view ResourceFlavor_json;
extern const std::string_view TrainJob_json;
extern const std::string_view kubernetes_json;
}  // namespace schemas

namespace {

using Json = nlohmann::ordered_json;

// The file of Kubernetes itself has "source", and "definitions" by name.
const Json& kubernetes() {
  static const Json file = Json::parse(schemas::kubernetes_json);
  return file;
}

// Those of the other projects have "source", "apiVersion", "kind", "scope" and
// "schema".
const std::map<std::string, Json>& files_of_kinds() {
  static const auto files = [] {
    std::map<std::string, Json> made;
    for (const auto text :
         {schemas::ClusterQueue_json, schemas::ClusterTrainingRuntime_json,
          schemas::Cohort_json, schemas::JobSet_json,
          schemas::LeaderWorkerSet_json, schemas::LocalQueue_json,
          schemas::PodMonitor_json, schemas::Queue_json,
          schemas::ResourceFlavor_json, schemas::TrainJob_json}) {
      Json file = Json::parse(text);
      const std::string kind = file["kind"];
      made[kind] = std::move(file);
    }
    return made;
  }();
  return files;
}

bool is_of_type(const Json& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "integer") return value.is_number_integer();
  if (type == "number") return value.is_number();
  ECHELON_CHECK(type == "int-or-string", "schema with the type {}", type);
  return value.is_number_integer() || value.is_string();
}

// Checks a value and all that it has, by the part of JSON Schema that
// definitions of custom resources use.
class Checker {
 public:
  explicit Checker(std::vector<std::string>& problems) : problems_(problems) {}

  void check(const Json& given, const Json& value, const std::string& place) {
    const Json& schema =
        given.contains("$ref")
            ? kubernetes()["definitions"].at(given["$ref"].get<std::string>())
            : given;
    if (schema.contains("type") && !is_of_type(value, schema["type"])) {
      return add(
          place, format(
                     "is {}, but must be of type {}", value.dump(),
                     schema["type"].get<std::string>()));
    }
    check_enum(schema, value, place);
    const auto outside = [&](const char* least, const char* most, auto size) {
      return (schema.contains(least) && size < schema[least]) ||
             (schema.contains(most) && size > schema[most]);
    };
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      if (outside("minLength", "maxLength", text.size())) {
        add(place, format("has {} characters", text.size()));
      }
      if (schema.contains("pattern")) {
        const std::string pattern = schema["pattern"];
        if (!std::regex_search(text, std::regex(pattern))) {
          add(place, format("\"{}\" does not match {}", text, pattern));
        }
      }
    } else if (value.is_number()) {
      if (outside("minimum", "maximum", value.get<double>())) {
        add(place, value.dump() + " is out of range");
      }
    } else if (value.is_array()) {
      if (outside("minItems", "maxItems", value.size())) {
        add(place, format("has {} items", value.size()));
      }
      if (!schema.contains("items")) return;
      for (size_t i = 0; i < value.size(); ++i) {
        check(schema["items"], value[i], format("{}[{}]", place, i));
      }
    } else if (value.is_object()) {
      check_members(schema, value, place);
    }
  }

 private:
  void
  check_enum(const Json& schema, const Json& value, const std::string& place) {
    if (!schema.contains("enum")) return;
    const Json& words = schema["enum"];
    if (std::ranges::find(words, value) != words.end()) return;
    add(place,
        format("is {}, but must be one of {}", value.dump(), words.dump()));
  }

  void check_members(
      const Json& schema, const Json& value, const std::string& place) {
    const Json& known =
        schema.contains("properties") ? schema["properties"] : Json::object();
    std::vector<std::string> names;
    for (const auto& [name, member] : known.items()) names.push_back(name);
    for (const auto& [name, member] : value.items()) {
      const std::string inside = place.empty() ? name : place + "." + name;
      if (known.contains(name)) {
        check(known[name], member, inside);
      } else if (!schema.contains("additionalProperties")) {
        continue;
      } else if (schema["additionalProperties"].is_object()) {
        check(schema["additionalProperties"], member, inside);
      } else if (schema["additionalProperties"] == false) {
        add(inside,
            "there is no such field" + config::did_you_mean(name, names));
      }
    }
    if (!schema.contains("required")) return;
    for (const auto& name : schema["required"]) {
      if (!value.contains(name)) {
        add(place, format("{} is missing", name.get<std::string>()));
      }
    }
  }

  void add(const std::string& place, const std::string& what) {
    problems_.push_back(place + ": " + what);
  }

  std::vector<std::string>& problems_;
};

}  // namespace

std::string schema_source(const std::string& kind) {
  const auto known = files_of_kinds().find(kind);
  if (known == files_of_kinds().end() &&
      !kubernetes()["definitions"].contains(kind)) {
    return "";
  }
  const Json& source = known == files_of_kinds().end()
                           ? kubernetes()["source"]
                           : known->second["source"];
  return format(
      "{} {}", source["repository"].get<std::string>(),
      source["revision"].get<std::string>());
}

std::vector<std::string> schema_problems(const Json& object) {
  const std::string kind = object.value("kind", "");
  std::vector<std::string> problems;
  Checker checker(problems);
  if (schema_source(kind).empty()) {
    problems.push_back(format("kind: there is no schema for {}", kind));
    return problems;
  }
  const auto known = files_of_kinds().find(kind);
  if (known == files_of_kinds().end()) {
    checker.check(kubernetes()["definitions"][kind], object, "");
    return problems;
  }
  const Json& file = known->second;
  if (object.value("apiVersion", "") != file["apiVersion"].get<std::string>()) {
    problems.push_back(format(
        "apiVersion: is {}, but the schema is of {}",
        object.value("apiVersion", ""), file["apiVersion"].get<std::string>()));
  }
  if (file["scope"] == "Cluster" && object.contains("metadata") &&
      object["metadata"].contains("namespace")) {
    problems.push_back(
        "metadata.namespace: an object of the whole cluster has none");
  }
  checker.check(file["schema"], object, "");
  return problems;
}

}  // namespace echelon::deploy
