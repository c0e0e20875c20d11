#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "echelon/cli/arguments.h"
#include "echelon/cli/terminal.h"
#include "echelon/config/byte_size.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ShowArguments {
  JobArguments job;
  bool json = false;
  bool toml = false;
};

/// A TOML value as JSON; options have no times of day.
Json to_json(const config::Value& value) {
  using Kind = config::Value::Kind;
  switch (value.kind) {
    case Kind::boolean:
      return value.boolean;
    case Kind::integer:
      return value.integer;
    case Kind::real:
      return value.real;
    case Kind::array: {
      auto items = Json::array();
      for (const auto& item : value.items) items.push_back(to_json(item));
      return items;
    }
    default:
      return value.string;
  }
}

/// Sizes are numbers of bytes in JSON.
Json to_json(const config::Entry& entry, const std::string& text) {
  auto value = config::parse_value(text, "");
  if (entry.type.ends_with("bytes")) {
    const auto to_number = [](config::Value& size) {
      const auto bytes = config::parse_bytes(size.string);
      if (bytes) size = config::Value(*bytes);
    };
    to_number(value);
    std::ranges::for_each(value.items, to_number);
  }
  return to_json(value);
}

/// The pattern of train.run, where {name}, {time} or {set} of it were filled
/// in; else empty.
std::string pattern_of(const Job& job, const config::Entry& entry) {
  if (entry.table != "train" || entry.key != "run") return "";
  std::string pattern = config::parse_value(entry.value, "").string;
  return pattern == job.train.run ? "" : pattern;
}

void show_json(const Job& job) {
  auto rows = Json::array();
  for (const auto& entry : job.document.entries()) {
    const std::string pattern = pattern_of(job, entry);
    Json row = {
        {"table", entry.table},
        {"key", entry.key},
        {"value", to_json(entry, entry.value)},
        {"default", to_json(entry, entry.default_value)},
        {"set_by", entry.place.short_text()}};
    if (!pattern.empty()) {
      row["value"] = job.train.run;
      row["pattern"] = pattern;
    }
    rows.push_back(std::move(row));
  }
  print_json(rows, std::cout);
}

void show_table(const Job& job) {
  const Style style = terminal_style();
  Rows rows;
  for (const auto& entry : job.document.entries()) {
    const std::string pattern = pattern_of(job, entry);
    std::string place = entry.place.short_text();
    if (!pattern.empty() && place.find(pattern) == std::string::npos) {
      place += ", run = \"" + pattern + "\"";
    }
    const std::string value =
        pattern.empty() ? entry.value : '"' + job.train.run + '"';
    rows.push_back({entry.key, config::shortened(value, 44), place});
  }
  const auto lines = split(aligned(rows));
  std::string table;
  size_t row = 0;
  for (const auto& entry : job.document.entries()) {
    if (entry.table != table) {
      std::cout << (table.empty() ? "" : "\n")
                << style.bold("[" + entry.table + "]") << "\n";
      table = entry.table;
    }
    const std::string& line = lines[row++];
    std::cout << (entry.place.is_default() ? style.dim(line) : line) << "\n";
  }
}

int show(const ShowArguments& arguments) {
  const Job job = load(arguments.job);
  if (arguments.json) {
    show_json(job);
  } else if (arguments.toml) {
    std::cout << to_toml(job);
  } else {
    show_table(job);
  }
  return 0;
}

std::string code(const std::string& text) {
  return "`" + text + "`";
}

std::string range(const config::Entry& entry) {
  if (entry.choices.empty()) return join(entry.rules, ", ");
  return join(entry.choices, ", ", code);
}

constexpr const char* kOpening = R"(# Configuration

`echelon train CONFIG.toml` reads one TOML file with a table for each component.
Every key has a default; `train.steps` or `train.epochs` must be set. An unknown
key, a value out of range and settings that contradict each other are found
before any rank starts. `--set TABLE.KEY=VALUE` sets a value over the file's;
there `train.steps` replaces the file's `epochs`, and the reverse. Sizes in bytes
may have a unit, as in `"48GiB"`, `"512 MiB"` and `"2GB"`.

The error of an unknown key names the key that was meant, also where it is the
name that PyTorch, Hugging Face, Lightning, DeepSpeed or Megatron-LM uses, such as
`gradient_accumulation_steps` or `max_grad_norm`.

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

/// doc/configuration.md
std::string reference() {
  std::string text = kOpening;
  const auto document = describe(Job{});
  std::string table;
  for (const auto& entry : document.entries()) {
    if (entry.table != table) {
      table = entry.table;
      text += format(
          "\n## [{}]: {}\n\n| key | type | default | may be | meaning |\n"
          "| --- | --- | --- | --- | --- |\n",
          table, document.help(table));
    }
    text += format(
        "| {} | {} | {} | {} | {} |\n", code(entry.key), entry.type,
        code(entry.default_value), range(entry), entry.help);
  }
  return text;
}

Json reference_json() {
  auto rows = Json::array();
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
  return rows;
}

struct ReferenceArguments {
  bool json = false;
};

int print_reference(const ReferenceArguments& arguments) {
  if (arguments.json) {
    print_json(reference_json(), std::cout);
  } else {
    std::cout << reference();
  }
  return 0;
}

}  // namespace

void add_config(Command& root) {
  Command group = root.add(
      "config", "show a configuration, or the reference of all keys",
      "echelon config show first.toml --set train.steps=5\n"
      "echelon config reference");
  group.require_subcommand();

  auto [command, arguments] = group.add(
      "show", "every value of a job and its source: default, file or flag",
      "echelon config show first.toml\n"
      "echelon config show first.toml -n 4 --set optimizer.learning_rate=1e-2\n"
      "echelon config show first.toml --toml > resolved.toml",
      show);
  add_job_arguments(command, arguments.job, true);
  command.flag("--json", arguments.json, "print JSON");
  command.flag(
      "--toml", arguments.toml, "print the complete configuration as TOML");
  command.exclude("--toml", "--json");

  auto [reference_command, reference_arguments] = group.add(
      "reference", "every key: type, default, allowed values, meaning",
      "echelon config reference", print_reference);
  reference_command.flag("--json", reference_arguments.json, "print JSON");
}

}  // namespace echelon::cli
