// The emitter of manifests. That readers take them as they are meant is in
// manifests_test.cpp.
#include "echelon/deploy/yaml.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace echelon::yaml_test {

using Json = nlohmann::ordered_json;
using deploy::to_yaml;

TEST(Yaml, KeepsTheOrderAndBreaksLinesBetweenMembers) {
  const Json value = {
      {"kind", "Job"},
      {"spec",
       {{"parallelism", 2},
        {"suspend", true},
        {"empty", Json::object()},
        {"none", Json::array()},
        {"rules",
         Json::array(
             {{{"action", "FailJob"}, {"values", {2, 93}}}, "last"})}}}};
  EXPECT_EQ(
      to_yaml(value),
      "kind: Job\n"
      "spec:\n"
      "  parallelism: 2\n"
      "  suspend: true\n"
      "  empty: {}\n"
      "  none: []\n"
      "  rules:\n"
      "  - action: FailJob\n"
      "    values:\n"
      "    - 2\n"
      "    - 93\n"
      "  - last\n");
}

TEST(Yaml, QuotesWhatCouldBeSomethingElse) {
  for (const char* text :
       {"yes",  "No",  "ON",   "off",  "y",        "true", "NULL", "~",
        "8",    "1e3", "0x10", "64Gi", "1:30",     "a: b", "- a",  "#a",
        "a #b", "",    " a",   "a ",   "*a",       "&a",   "!a",   "%a",
        "@a",   "{a}", "[a]",  "a\tb", "$(INDEX)", "=",    "a\\b"}) {
    EXPECT_EQ(to_yaml(Json{{"key", text}}), "key: " + Json(text).dump() + "\n");
  }
  for (const char* text : {"Indexed", "first-0.first", "nvidia.com/gpu"}) {
    EXPECT_EQ(to_yaml(Json{{"key", text}}), "key: " + std::string(text) + "\n");
  }
  EXPECT_EQ(to_yaml(Json{{"on", 1}}), "\"on\": 1\n");
}

TEST(Yaml, TextsOfLinesAreBlocks) {
  EXPECT_EQ(
      to_yaml(Json{{"a.toml", "[train]\n\nsteps = 1\n"}}),
      "a.toml: |\n"
      "  [train]\n"
      "\n"
      "  steps = 1\n");
  // A block would lose or change these.
  for (const char* text :
       {"a\n\n", "\na\n", " a\n", "a \nb\n", "a\tb\n", "a\nb"}) {
    EXPECT_EQ(to_yaml(Json{{"key", text}}), "key: " + Json(text).dump() + "\n");
  }
}

}  // namespace echelon::yaml_test
