// The commands declare themselves through Command, which hides CLI11. Parsing
// only stores the action of the command that was named; it runs when parsing is
// done, so that errors of a command are never taken for errors of its flags.
// CLI11's messages are replaced where the user's word is likely a mistake:
// unknown flags and commands get the nearest one of this program, or what
// another program's word means here.
#include "echelon/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "echelon/cli/arguments.h"
#include "echelon/cli/help.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/pool/keeper.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"
#include "echelon/text/plain.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

constexpr int kConfiguration = static_cast<int>(ExitCode::configuration);

class Help : public CLI::FormatterBase {
 public:
  std::string make_help(
      const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    return help_text(*app, terminal_style());
  }
};

/// The commands by what they are for, in the order of --help.
struct Group {
  const char* name;
  std::vector<void (*)(Command&)> add;
};

const std::vector<Group>& groups() {
  static const std::vector<Group> all = {
      {"Train",
       {add_new, add_train, add_run, add_job, add_deploy, add_submit,
        add_verify, add_sample, add_import, add_export}},
      {"Share", {add_pool}},
      {"Inspect",
       {add_watch, add_explain, add_report, add_compare, add_checkpoint,
        add_config}},
      {"Plan", {add_plan, add_simulate, add_schedule}},
      {"Machine",
       {add_doctor, add_bench, add_completion, add_help, add_version}}};
  return all;
}

/// The program after `--` on the command line of `run`, hidden from CLI11.
std::vector<std::string>& program_behind_dashes() {
  static std::vector<std::string> program;
  return program;
}

void take_program(const CLI::App& app, std::vector<std::string>& program) {
  program = app.remaining();
  const auto& behind = program_behind_dashes();
  // What is left over is the program and its arguments, unless it begins with a
  // flag that `run` does not have, or the program is behind `--`.
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
  for (const auto& group : groups()) {
    const size_t before = subcommands(*app).size();
    for (auto* add : group.add) add(root);
    const auto all = app->get_subcommands([](auto*) { return true; });
    for (size_t i = before; i < all.size(); ++i) all[i]->group(group.name);
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

/// What a flag of another program is here: --epochs is --set train.epochs=….
std::string flag_meant(const CLI::App& app, const std::string& flag) {
  const auto flags = flags_of(app);
  const bool sets = std::ranges::find(flags, "--set") != flags.end();
  std::string name =
      flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
  std::ranges::replace(name, '-', '_');
  const std::string key = sets ? describe(Job{}).key_meant(name) : "";
  if (key == "layout.dp") return "; did you mean -n?";
  if (!key.empty()) return format("; did you mean --set {}=…?", key);
  // Dashes make short names look alike.
  std::vector<std::string> bare;
  for (const auto& one : flags) bare.push_back(one.substr(2));
  const std::string near = config::nearest(name, bare);
  return near.empty() ? "" : format("; did you mean \"--{}\"?", near);
}

/// What a command of another program is here.
std::string
command_meant(const std::string& word, const std::vector<std::string>& names) {
  constexpr std::pair<const char*, const char*> kOthers[] = {
      {"fit", "train"},       {"pretrain", "train"},  {"finetune", "train"},
      {"tune", "plan"},       {"launch", "run"},      {"torchrun", "run"},
      {"test", "verify"},     {"generate", "sample"}, {"chat", "sample"},
      {"convert", "export"},  {"save", "export"},     {"load", "import"},
      {"profile", "explain"}, {"top", "watch"},       {"monitor", "watch"},
      {"env", "doctor"},      {"print", "show"}};
  for (const auto& [other, ours] : kOthers) {
    if (word == other && std::ranges::find(names, ours) != names.end()) {
      return format("; did you mean \"{}\"?", ours);
    }
  }
  return config::did_you_mean(word, names);
}

int unknown(const CLI::App& app, const std::string& word) {
  const std::string name = full_name(app);
  std::string text;
  if (word.starts_with('-')) {
    const std::string flag = word.substr(0, word.find('='));
    text = format("{}: unknown flag {}{}", name, flag, flag_meant(app, flag));
  } else if (const auto subs = subcommands(app); subs.empty()) {
    text = format("{}: unexpected argument \"{}\"", name, word);
  } else {
    std::vector<std::string> names;
    for (const auto* sub : subs) names.push_back(sub->get_name());
    text = format(
        "{}: unknown command \"{}\"{}", name, word, command_meant(word, names));
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
  if (const std::string prefix = "Could not convert: ";
      text.starts_with(prefix)) {
    text = text.substr(prefix.size()) + ": must be a number";
  }
  std::cerr << format("{}: {}; `{} --help` has examples\n", name, text, name);
  return kConfiguration;
}

int act(const Action& action) {
  try {
    return action();
  } catch (const Error& error) {
    std::cout.flush();
    std::cerr << plain(error.what(), "\n\t") << "\n";
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::cout.flush();
    std::cerr << "echelon: " << plain(error.what(), "\n\t") << "\n";
    return static_cast<int>(ExitCode::failure);
  }
}

/// Cuts off what follows `--`, which belongs to the user's program.
std::vector<std::string> without_program(std::vector<std::string> arguments) {
  const bool has_program =
      !arguments.empty() && (arguments[0] == "run" ||
                             (arguments.size() > 1 && arguments[0] == "pool" &&
                              arguments[1] == "submit"));
  if (!has_program) return arguments;
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
    // `echelon trian --help` asks for the help of something else.
    const CLI::App& named = *chosen(app.get());
    const auto rest = named.remaining(false);
    if (!subcommands(named).empty() && !rest.empty() &&
        !rest.front().starts_with('-')) {
      return unknown(named, rest.front());
    }
    std::cout << chosen(app.get())->help();
    return 0;
  } catch (const CLI::ParseError& error) {
    if (!arguments.empty()) return refuse(*app, error);
    std::cout << app->help();
    return kConfiguration;
  }
  return act(action);
}

struct HelpArguments {
  std::vector<std::string> command;
  std::string man;
  const CLI::App* root = nullptr;
};

int print_help(const HelpArguments& arguments) {
  if (!arguments.man.empty()) {
    const size_t pages = write_manual(*arguments.root, arguments.man);
    std::cout << format(
        "wrote {}: {}; man -l {}/echelon.1 shows the first\n", arguments.man,
        counted(static_cast<int64_t>(pages), "manual page"), arguments.man);
    return 0;
  }
  auto words = arguments.command;
  words.emplace_back("--help");
  return parse_and_act(words);
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

void Command::optional_positionals(
    const char* name, std::vector<std::string>& values, const char* help) {
  app_->add_option(name, values, help)->type_name("");
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
      ->allow_extra_args(false)  // one value behind each name
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

void add_help(Command& root) {
  auto [command, arguments] = root.add(
      "help", "print the help of a command, or write all of it as man pages",
      "echelon help train\n"
      "echelon help config show\n"
      "echelon help --man ~/.local/share/man/man1",
      print_help);
  arguments.root = &command.root();
  command.optional_positionals(
      "COMMAND", arguments.command, "a command, and its subcommand");
  command.option(
      "--man", arguments.man, "FOLDER",
      "write a manual page for each command into this folder");
}

int run_command_line(const std::vector<std::string>& arguments) {
  // The pool's daemon starts this for each job; no user does.
  if (arguments.size() == 4 && arguments[0] == "pool" &&
      arguments[1] == "keep") {
    return pool::keep({arguments[2], std::atoll(arguments[3].c_str())});
  }
  const AsciiOutput ascii;
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
