#include "echelon/cli/help.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

using Row = std::pair<std::string, std::string>;

std::string heading(const std::string& text) {
  return has_colours(1) ? "\033[1m" + text + "\033[0m" : text;
}

constexpr size_t kColumns = 80;

void print_rows(std::ostream& out, const std::vector<Row>& rows) {
  constexpr size_t kWidest = 30;
  size_t width = 0;
  for (const auto& [left, right] : rows) {
    width = std::max(width, std::min(columns(left), kWidest));
  }
  for (const auto& [left, right] : rows) {
    out << "  " << left;
    size_t column = columns(left);
    if (column > width) {
      out << "\n  ";
      column = 0;
    }
    out << std::string(width - column + 2, ' ');
    out << wrapped(right, width + 4, kColumns) << "\n";
  }
}

std::string spelled(const CLI::Option& option) {
  std::string text;
  for (const auto& name : option.get_snames()) text += "-" + name + ", ";
  for (const auto& name : option.get_lnames()) text += "--" + name + ", ";
  if (text.size() >= 2) text.resize(text.size() - 2);
  const std::string type = option.get_type_name();
  if (option.get_items_expected_max() > 0 && !type.empty()) text += " " + type;
  return text;
}

std::string usage(const CLI::App& app) {
  std::string text = full_name(app);
  const auto subs = app.get_subcommands([](const auto*) { return true; });
  if (!subs.empty()) return text + " COMMAND";
  for (const auto* option : app.get_options()) {
    if (!option->get_positional()) continue;
    text += option->get_required() ? " " + option->get_name(true)
                                   : " [" + option->get_name(true) + "]";
  }
  text += " [options]";
  return app.get_name() == "run" ? text + " -- PROGRAM [arguments]" : text;
}

}  // namespace

bool has_colours(int stream) {
  const char* no = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  return ::isatty(stream) == 1 && (no == nullptr || *no == '\0') &&
         term != nullptr && std::string(term) != "dumb";
}

std::string full_name(const CLI::App& app) {
  const auto* parent = app.get_parent();
  return parent == nullptr ? app.get_name()
                           : full_name(*parent) + " " + app.get_name();
}

namespace {

std::string make_help(const CLI::App* app) {
  std::ostringstream out;
  out << heading("Examples") << "\n";
  std::istringstream examples(app->get_footer());
  for (std::string line; std::getline(examples, line);) {
    out << "  " << line << "\n";
  }
  out << "\n" << heading(usage(*app)) << "\n";
  out << wrapped(app->get_description(), 0, kColumns) << "\n";

  std::vector<Row> commands;
  for (const auto* sub :
       app->get_subcommands([](const auto*) { return true; })) {
    commands.emplace_back(sub->get_name(), sub->get_description());
  }
  if (!commands.empty()) {
    out << "\n" << heading("Commands") << "\n";
    print_rows(out, commands);
  }
  std::vector<Row> options;
  for (const auto* option : app->get_options()) {
    if (option->get_group().empty() || option->get_positional()) continue;
    options.emplace_back(spelled(*option), option->get_description());
  }
  out << "\n" << heading("Options") << "\n";
  print_rows(out, options);
  if (app->get_parent() == nullptr) {
    out << "\n`echelon COMMAND --help` shows a command's examples and "
           "options.\n";
  }
  return out.str();
}

class Help : public CLI::FormatterBase {
 public:
  std::string make_help(
      const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    return cli::make_help(app);
  }
};

}  // namespace

void set_help(CLI::App& app) {
  app.formatter(std::make_shared<Help>());
}

}  // namespace echelon::cli
