#include "echelon/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "echelon/cli/arguments.h"
#include "echelon/cli/build_info.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

constexpr int kConfiguration = static_cast<int>(ExitCode::configuration);

/// "echelon config show"
std::string full_name(const CLI::App& app) {
  const auto* parent = app.get_parent();
  return parent == nullptr ? app.get_name()
                           : full_name(*parent) + " " + app.get_name();
}

std::vector<const CLI::App*> subcommands(const CLI::App& app) {
  return app.get_subcommands([](const auto*) { return true; });
}

/// Prints examples first, then the usage and the options.
class Help : public CLI::FormatterBase {
 public:
  std::string make_help(
      const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    std::ostringstream out;
    out << style_.bold("Examples") << "\n";
    for (const auto& line : split(app->get_footer())) {
      out << "  " << line << "\n";
    }
    out << "\n" << style_.bold(usage(*app)) << "\n";
    out << wrapped(app->get_description(), 0, kColumns) << "\n";

    std::vector<Row> commands, positionals, options;
    for (const auto* sub : subcommands(*app)) {
      commands.emplace_back(sub->get_name(), sub->get_description());
    }
    for (const auto* option : app->get_options()) {
      if (option->get_group().empty()) continue;
      const auto& help = option->get_description();
      if (option->get_positional()) {
        positionals.emplace_back(option->get_name(true), help);
      } else {
        options.emplace_back(spelled(*option), help);
      }
    }
    print(out, "Commands", commands);
    print(out, "Arguments", positionals);
    print(out, "Options", options);
    if (app->get_parent() == nullptr) {
      out << "\n`echelon COMMAND --help` shows a command's examples and "
             "options.\n";
    }
    return out.str();
  }

 private:
  using Row = std::pair<std::string, std::string>;
  static constexpr size_t kColumns = 80;

  void print(
      std::ostream& out, const char* heading,
      const std::vector<Row>& rows) const {
    if (rows.empty()) return;
    out << "\n" << style_.bold(heading) << "\n";
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
      out << std::string(width - column + 2, ' ')
          << wrapped(right, width + 4, kColumns) << "\n";
    }
  }

  static std::string spelled(const CLI::Option& option) {
    std::string text;
    for (const auto& name : option.get_snames()) text += "-" + name + ", ";
    for (const auto& name : option.get_lnames()) text += "--" + name + ", ";
    if (text.size() >= 2) text.resize(text.size() - 2);
    const std::string type = option.get_type_name();
    if (option.get_items_expected_max() > 0 && !type.empty())
      text += " " + type;
    return text;
  }

  static std::string usage(const CLI::App& app) {
    std::string text = full_name(app);
    if (!subcommands(app).empty()) return text + " COMMAND";
    for (const auto* option : app.get_options()) {
      if (!option->get_positional()) continue;
      text += option->get_required() ? " " + option->get_name(true)
                                     : " [" + option->get_name(true) + "]";
    }
    text += " [options]";
    return app.get_name() == "run" ? text + " -- PROGRAM [arguments]" : text;
  }

  Style style_ = terminal_style();
};

/// The program after `--` on the command line of `run`, hidden from CLI11.
std::vector<std::string>& program_behind_dashes() {
  static std::vector<std::string> program;
  return program;
}

void take_program(const CLI::App& app, std::vector<std::string>& program) {
  program = app.remaining();
  const auto& behind = program_behind_dashes();
  if (!program.empty() && (program[0][0] == '-' || !behind.empty())) {
    throw CLI::ExtrasError(app.get_name(), program);
  }
  if (program.empty()) program = behind;
  if (program.empty()) {
    throw CLI::ValidationError(
        "no program is named; put it last, as in `echelon run -n 4 -- "
        "./program`");
  }
}

std::unique_ptr<CLI::App> make_tree(Action& action) {
  auto app = std::make_unique<CLI::App>(
      "Multi-GPU training of deep learning models in C++.", "echelon");
  app->set_help_flag("-h,--help", "print this help");
  // Handled before parsing, since a command is required.
  app->add_flag("--version")->description("print the version");
  app->formatter(std::make_shared<Help>());
  app->require_subcommand(1);
  app->footer(
      "echelon train examples/configs/digits.toml -n 2   train on two ranks\n"
      "echelon verify examples/configs/digits.toml -n 2  prove that it equals "
      "one\n"
      "echelon run -n 4 -- ./program                     start your own "
      "program\n"
      "echelon config show first.toml                    every value and its "
      "source\n"
      "echelon doctor                                    check this machine");
  Command root(*app, action);
  for (auto* add :
       {add_train, add_run, add_verify, add_compare, add_export, add_import,
        add_sample, add_bench, add_checkpoint, add_plan, add_explain,
        add_schedule, add_simulate, add_doctor, add_config, add_completion,
        add_version}) {
    add(root);
  }
  return app;
}

/// The innermost command that was named.
const CLI::App* chosen(const CLI::App* app) {
  const auto named = app->get_subcommands();
  return named.empty() ? app : chosen(named.back());
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> flags;
  for (const auto* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    for (const auto& name : option->get_lnames()) flags.push_back("--" + name);
  }
  return flags;
}

int unknown(const CLI::App& app, const std::string& word) {
  const std::string name = full_name(app);
  std::string text;
  if (word.starts_with('-')) {
    const std::string flag = word.substr(0, word.find('='));
    text = format(
        "{}: unknown flag {}{}", name, flag,
        config::did_you_mean(flag, flags_of(app)));
  } else if (const auto subs = subcommands(app); subs.empty()) {
    text = format("{}: unexpected argument \"{}\"", name, word);
  } else {
    std::vector<std::string> names;
    for (const auto* sub : subs) names.push_back(sub->get_name());
    text = format(
        "{}: unknown command \"{}\"{}", name, word,
        config::did_you_mean(word, names));
  }
  if (text.back() != '?') {
    text += format("; `{} --help` lists the choices", name);
  }
  std::cerr << text << "\n";
  return kConfiguration;
}

int refuse(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = *chosen(&app);
  // The first leftover is the mistake: options are parsed before positionals.
  const auto rest = command.remaining(false);
  const auto above = app.remaining(true);
  if (!rest.empty()) return unknown(command, rest.front());
  if (!above.empty()) return unknown(app, above.front());
  std::string text = error.what();
  if (const size_t end = text.find('\n'); end != std::string::npos) {
    text.resize(end);
  }
  const std::string name = full_name(command);
  std::cerr << format("{}: {}; `{} --help` has examples\n", name, text, name);
  return kConfiguration;
}

int act(const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    std::cout.flush();
    std::cerr << error.what() << "\n";
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::cout.flush();
    std::cerr << "echelon: " << error.what() << "\n";
    return static_cast<int>(ExitCode::failure);
  }
}

/// Cuts off what follows `--`, which belongs to the user's program.
std::vector<std::string> without_program(std::vector<std::string> arguments) {
  if (arguments.empty() || arguments.front() != "run") return arguments;
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  const auto program = dashes == arguments.end() ? dashes : dashes + 1;
  program_behind_dashes() = {program, arguments.end()};
  arguments.erase(dashes, arguments.end());
  return arguments;
}

int parse_and_act(const std::vector<std::string>& arguments) {
  Action action;
  const auto app = make_tree(action);
  try {
    auto own = without_program(arguments);
    std::reverse(own.begin(), own.end());  // CLI11 takes them from the back
    app->parse(own);
  } catch (const CLI::CallForHelp&) {
    std::cout << chosen(app.get())->help();
    return 0;
  } catch (const CLI::ParseError& error) {
    if (!arguments.empty()) return refuse(*app, error);
    std::cout << app->help();
    return kConfiguration;
  }
  return act(action);
}

struct VersionArguments {
  bool json = false;
};

int print_version(const VersionArguments& arguments) {
  if (!arguments.json) {
    std::cout << format("echelon {}\n", build_info::kVersion);
    return 0;
  }
  std::cout << format(
      "{{\"version\":\"{}\",\"compiler\":\"{}\",\"build_type\":\"{}\"}}\n",
      build_info::kVersion, build_info::kCompiler, build_info::kBuildType);
  return 0;
}

}  // namespace

Command Command::add(const char* name, const char* help, const char* examples) {
  auto* command = app_->add_subcommand(name, help);
  command->footer(examples);
  return {*command, *action_};
}

void Command::act(Action action) {
  app_->callback([app = app_, to = action_, action = std::move(action)] {
    if (app->get_subcommands().empty()) *to = action;
  });
}

void Command::act_on_program(std::vector<std::string>& program, Action action) {
  app_->prefix_command();
  app_->callback(
      [app = app_, &program, to = action_, action = std::move(action)] {
        take_program(*app, program);
        *to = action;
      });
}

void Command::require_subcommand() {
  app_->require_subcommand(1);
}

void Command::positional(
    const char* name, std::string& value, const char* help, const char* type) {
  app_->add_option(name, value, help)->required()->type_name(type);
}

void Command::optional_positional(
    const char* name, std::string& value, const char* help) {
  app_->add_option(name, value, help)->type_name("");
}

void Command::positionals(
    const char* name, std::vector<std::string>& values, const char* help) {
  app_->add_option(name, values, help)->required()->type_name("");
}

template <typename Value>
void Command::option(
    const char* name, Value& value, const std::string& type, const char* help) {
  app_->add_option(name, value, help)->type_name(type);
}

template void
Command::option(const char*, std::string&, const std::string&, const char*);
template void
Command::option(const char*, int64_t&, const std::string&, const char*);
template void
Command::option(const char*, double&, const std::string&, const char*);
template void Command::option(
    const char*, std::vector<std::string>&, const std::string&, const char*);

void Command::repeated_option(
    const char* name, std::vector<std::string>& values, const char* type,
    const char* help) {
  app_->add_option(name, values, help)
      ->type_name(type)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void Command::required_option(
    const char* name, std::string& value, const char* type, const char* help) {
  app_->add_option(name, value, help)->type_name(type)->required();
}

void Command::option_with_optional_value(
    const char* name, std::string& value, const char* type, const char* help) {
  app_->add_option(name, value, help)->type_name(type)->expected(0, 1);
}

void Command::flag(const char* name, bool& value, const char* help) {
  app_->add_flag(name, value, help);
}

void Command::hidden_flag(const char* name, bool& value) {
  app_->add_flag(name, value)->group("");
}

void Command::exclude(const char* name, const char* other) {
  app_->get_option(name)->excludes(app_->get_option(other));
}

bool Command::given(const char* name) const {
  return app_->get_option(name)->count() > 0;
}

CLI::App& Command::root() const {
  CLI::App* app = app_;
  while (app->get_parent() != nullptr) app = app->get_parent();
  return *app;
}

void add_version(Command& root) {
  auto [command, arguments] = root.add(
      "version", "print the version", "echelon version\nechelon version --json",
      print_version);
  command.flag("--json", arguments.json, "print it as JSON");
}

int run_command_line(const std::vector<std::string>& arguments) {
  const bool version = arguments == std::vector<std::string>{"--version"};
  const int code =
      version ? parse_and_act({"version"}) : parse_and_act(arguments);
  std::cout.flush();
  if (!std::cout) {
    std::fputs("echelon: standard output cannot be written\n", stderr);
    return code == 0 ? static_cast<int>(ExitCode::failure) : code;
  }
  return code;
}

}  // namespace echelon::cli
