#include "echelon/cli/reference.h"

#include <nlohmann/json.hpp>

#include "echelon/job/job.h"

namespace echelon::cli {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string code(const std::string& text) {
  return "`" + text + "`";
}

std::string range(const config::Entry& entry) {
  std::vector<std::string> choices;
  for (const auto& choice : entry.choices) choices.push_back(code(choice));
  return choices.empty() ? joined(entry.rules) : joined(choices);
}

constexpr const char* kOpening = R"(# Configuration

`echelon train CONFIG.toml` reads one TOML file with a table for each component.
Every key has a default; `train.steps` or `train.epochs` must be set. An unknown
key, a value out of range and settings that contradict each other are found
before any rank starts. `--set TABLE.KEY=VALUE` sets a value over the file's.

    [model]
    name = "simple_cnn"

    [data]
    name = "digits"

    [train]
    epochs = 20
    run = "runs/first"

`echelon config show CONFIG.toml` prints every value and who set it. This page is
what `echelon config reference` prints.
)";

}  // namespace

std::string reference() {
  std::string text = kOpening;
  const auto document = describe(Job{});
  std::string table;
  for (const auto& entry : document.entries()) {
    if (entry.table != table) {
      table = entry.table;
      text += "\n## [" + table + "]: " + document.help(table) +
              "\n\n| key | type | default | may be | meaning |\n"
              "| --- | --- | --- | --- | --- |\n";
    }
    text += "| " + code(entry.key) + " | " + entry.type + " | " +
            code(entry.default_value) + " | " + range(entry) + " | " +
            entry.help + " |\n";
  }
  return text;
}

std::string reference_json_text() {
  auto rows = nlohmann::ordered_json::array();
  const auto document = describe(Job{});
  for (const auto& entry : document.entries()) {
    rows.push_back(
        {{"table", entry.table},
         {"key", entry.key},
         {"type", entry.type},
         {"default", entry.default_value},
         {"rules", entry.rules},
         {"choices", entry.choices},
         {"help", entry.help}});
  }
  return rows.dump(2) + "\n";
}

}  // namespace echelon::cli
