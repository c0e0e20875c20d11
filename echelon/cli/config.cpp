#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/help.h"
#include "echelon/cli/reference.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

struct ShowArguments {
  JobArguments job;
  bool json = false;
  bool toml = false;
};

// A TOML value as JSON; times of day do not occur in options.
nlohmann::ordered_json to_json(const config::Value& value) {
  using Kind = config::Value::Kind;
  switch (value.kind) {
    case Kind::boolean:
      return value.boolean;
    case Kind::integer:
      return value.integer;
    case Kind::real:
      return value.real;
    case Kind::array: {
      auto items = nlohmann::ordered_json::array();
      for (const auto& item : value.items) items.push_back(to_json(item));
      return items;
    }
    default:
      return value.string;
  }
}

void show_json(const Job& job) {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& entry : job.document.entries()) {
    rows.push_back(
        {{"table", entry.table},
         {"key", entry.key},
         {"value", to_json(config::parse_value(entry.value, ""))},
         {"default", to_json(config::parse_value(entry.default_value, ""))},
         {"set_by", entry.place.short_text()}});
  }
  std::cout << rows.dump(2) << "\n";
}

void show_table(const Job& job) {
  const bool colours = has_colours(1);
  const std::string dim = colours ? "\033[2m" : "";
  const std::string bold = colours ? "\033[1m" : "";
  const std::string end = colours ? "\033[0m" : "";
  std::vector<std::vector<std::string>> rows;
  std::vector<bool> changed;
  for (const auto& entry : job.document.entries()) {
    rows.push_back(
        {entry.key, config::shortened(entry.value, 44),
         entry.place.short_text()});
    changed.push_back(!entry.place.is_default());
  }
  const std::string text = aligned(rows);
  size_t begin = 0;
  std::string table;
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t line_end = text.find('\n', begin);
    const auto& entry = job.document.entries()[i];
    if (entry.table != table) {
      std::cout << (i == 0 ? "" : "\n") << bold << "[" << entry.table << "]"
                << end << "\n";
      table = entry.table;
    }
    std::cout << (changed[i] ? "" : dim) << text.substr(begin, line_end - begin)
              << (changed[i] ? "" : end) << "\n";
    begin = line_end + 1;
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

}  // namespace

void add_config(CLI::App& app, Action& action) {
  auto* group = app.add_subcommand(
      "config", "show a configuration, or what one may hold");
  group->require_subcommand(1);
  group->footer(
      "echelon config show first.toml --set train.steps=5\n"
      "echelon config reference");

  auto* show_command =
      group->add_subcommand("show", "every value of a job, and who set it");
  show_command->footer(
      "echelon config show first.toml\n"
      "echelon config show first.toml -n 4 --set optimizer.learning_rate=1e-2\n"
      "echelon config show first.toml --toml > resolved.toml");
  auto arguments = std::make_shared<ShowArguments>();
  add_job_arguments(*show_command, arguments->job, true);
  auto* json = show_command->add_flag("--json", arguments->json, "print JSON");
  show_command
      ->add_flag(
          "--toml", arguments->toml, "print the complete configuration as TOML")
      ->excludes(json);
  show_command->callback([&action, arguments] {
    action = [arguments] { return show(*arguments); };
  });

  auto* reference_command = group->add_subcommand(
      "reference", "every key: type, default, what it may be, what it means");
  reference_command->footer("echelon config reference");
  auto reference_json = std::make_shared<bool>(false);
  reference_command->add_flag("--json", *reference_json, "print JSON");
  reference_command->callback([&action, reference_json] {
    action = [reference_json] {
      std::cout << (*reference_json ? reference_json_text() : reference());
      return 0;
    };
  });
}

}  // namespace echelon::cli
