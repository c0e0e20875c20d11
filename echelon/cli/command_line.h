// The program `echelon`: one tree of commands, one file for each.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace echelon::cli {

/// What the chosen command does; returns the exit code. Set by parsing.
using Action = std::function<int()>;

/// Each adds its command to `app` and, when it is chosen, sets `action`.
void add_train(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_compare(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_export(CLI::App& app, Action& action);
void add_import(CLI::App& app, Action& action);
void add_sample(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_schedule(CLI::App& app, Action& action);
void add_simulate(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_checkpoint(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_config(CLI::App& app, Action& action);
void add_completion(CLI::App& app, Action& action);
void add_version(CLI::App& app, Action& action);

/// What stands behind `--` on the command line of `run`.
void set_program(const std::vector<std::string>& program);

/// Parses `arguments` (without the program's name) and does what they say.
/// Errors go to stderr; returns the exit code, as error.h has them.
int run_command_line(const std::vector<std::string>& arguments);

}  // namespace echelon::cli
