// The program `echelon`: a tree of commands, one file each. Only
// command_line.cpp, help.cpp and completion.cpp include CLI11, which is slow to
// compile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace echelon::cli {

/// Runs the chosen command and returns the exit code. Set by parsing.
using Action = std::function<int()>;

/// A command of the tree while it is declared. Variables that options write to
/// must outlive the parsing. `type` is how --help prints an option's value;
/// the values of "a|b" are completed by shells.
class Command {
 public:
  Command(CLI::App& app, Action& action) : app_(&app), action_(&action) {}

  /// Adds a subcommand. `examples` are lines that --help prints first.
  Command add(const char* name, const char* help, const char* examples);
  /// Adds a subcommand that calls `act` with its parsed arguments.
  template <typename Arguments>
  std::pair<Command, Arguments&>
  add(const char* name, const char* help, const char* examples,
      int (*act)(const Arguments&)) {
    auto arguments = std::make_shared<Arguments>();
    Command command = add(name, help, examples);
    command.act([arguments, act] { return act(*arguments); });
    return {command, *arguments};
  }

  /// Sets the action of this command, where no subcommand of it is named.
  void act(Action action);
  /// The same for a command that ends with a program and its arguments, which
  /// are written to `program`.
  void act_on_program(std::vector<std::string>& program, Action action);
  /// One of the subcommands must be named.
  void require_subcommand();

  void positional(
      const char* name, std::string& value, const char* help,
      const char* type = "");
  void
  optional_positional(const char* name, std::string& value, const char* help);
  void optional_positionals(
      const char* name, std::vector<std::string>& values, const char* help);
  /// Takes one or more values.
  void positionals(
      const char* name, std::vector<std::string>& values, const char* help);

  /// "-o,--output". A value is a string, int64_t, double or vector of strings;
  /// a vector takes all values up to the next flag.
  template <typename Value>
  void option(
      const char* name, Value& value, const std::string& type,
      const char* help);
  /// Takes one value each time that it is given.
  void repeated_option(
      const char* name, std::vector<std::string>& values, const char* type,
      const char* help);
  void required_option(
      const char* name, std::string& value, const char* type, const char* help);
  /// Its value may be left out and is then empty.
  void option_with_optional_value(
      const char* name, std::string& value, const char* type, const char* help);
  void flag(const char* name, bool& value, const char* help);
  /// A flag for tests, which --help does not show.
  void hidden_flag(const char* name, bool& value);
  void exclude(const char* name, const char* other);
  /// Whether the user gave this option.
  bool given(const char* name) const;

  /// The whole tree.
  CLI::App& root() const;

 private:
  CLI::App* app_;
  Action* action_;
};

void add_train(Command& root);
void add_run(Command& root);
void add_verify(Command& root);
void add_compare(Command& root);
void add_explain(Command& root);
void add_report(Command& root);
void add_watch(Command& root);
void add_export(Command& root);
void add_import(Command& root);
void add_new(Command& root);
void add_job(Command& root);
void add_sample(Command& root);
void add_bench(Command& root);
void add_schedule(Command& root);
void add_simulate(Command& root);
void add_plan(Command& root);
void add_deploy(Command& root);
void add_submit(Command& root);
void add_pool(Command& root);
void add_checkpoint(Command& root);
void add_doctor(Command& root);
void add_config(Command& root);
void add_completion(Command& root);
void add_help(Command& root);
void add_version(Command& root);

/// Parses `arguments` (without the program's name) and runs the command that
/// they name. Prints errors to stderr; returns an exit code of error.h.
int run_command_line(const std::vector<std::string>& arguments);

}  // namespace echelon::cli
