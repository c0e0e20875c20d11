#include "echelon/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>

#include "echelon/cli/help.h"
#include "echelon/error.h"
#include "echelon/text/nearest.h"

namespace echelon::cli {
namespace {

constexpr int kConfiguration = static_cast<int>(ExitCode::configuration);

std::unique_ptr<CLI::App> make_tree(Action& action) {
  auto app = std::make_unique<CLI::App>(
      "Multi-GPU training of deep learning models in C++.", "echelon");
  app->set_help_flag("-h,--help", "print this help");
  // Answered before parsing, since a command is required.
  app->add_flag("--version")->description("print the version");
  set_help(*app);
  app->require_subcommand(1);
  app->footer(
      "echelon train examples/configs/digits.toml -n 2   train on two ranks\n"
      "echelon verify examples/configs/digits.toml -n 2  prove it equals one\n"
      "echelon run -n 4 -- ./program                     start your own "
      "program\n"
      "echelon config show first.toml                    every value, who set "
      "it\n"
      "echelon doctor                                    what is amiss here");
  for (auto* add :
       {add_train, add_run, add_verify, add_compare, add_export, add_import,
        add_sample, add_bench, add_checkpoint, add_plan, add_explain,
        add_schedule, add_simulate, add_doctor, add_config, add_completion,
        add_version}) {
    add(*app, action);
  }
  return app;
}

// The innermost command that was named.
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
  std::string text = full_name(app);
  if (word.rfind('-', 0) == 0) {
    const std::string flag = word.substr(0, word.find('='));
    text +=
        ": unknown flag " + flag + config::did_you_mean(flag, flags_of(app));
  } else {
    std::vector<std::string> names;
    for (const auto* sub :
         app.get_subcommands([](const auto*) { return true; })) {
      names.push_back(sub->get_name());
    }
    text += names.empty() ? ": unexpected argument \"" + word + "\""
                          : ": unknown command \"" + word + "\"" +
                                config::did_you_mean(word, names);
  }
  if (text.back() != '?') {
    text += "; `" + full_name(app) + " --help` shows what there is";
  }
  std::cerr << text << "\n";
  return kConfiguration;
}

int refuse(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = *chosen(&app);
  // Options before positionals are parsed, so the first leftover is the
  // mistake.
  const auto rest = command.remaining(false);
  const auto above = app.remaining(true);
  if (!rest.empty()) return unknown(command, rest.front());
  if (!above.empty()) return unknown(app, above.front());
  std::string text = error.what();
  if (const size_t end = text.find('\n'); end != std::string::npos) {
    text.resize(end);
  }
  std::cerr << full_name(command) << ": " << text << "; `" << full_name(command)
            << " --help` has examples\n";
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

// What follows `--` belongs to the user's program; CLI11 never sees it.
std::vector<std::string> without_program(std::vector<std::string> arguments) {
  if (arguments.empty() || arguments.front() != "run") return arguments;
  const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
  const auto program = dashes == arguments.end() ? dashes : dashes + 1;
  set_program({program, arguments.end()});
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

}  // namespace

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
