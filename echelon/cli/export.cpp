#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/error.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct ExportArguments {
  std::string run;
  std::string out;
};

void check_export(const ExportArguments& arguments) {
  std::error_code error;
  if (!fs::exists(fs::path(arguments.run) / "config.toml", error)) {
    throw ConfigError(
        arguments.run +
        ": is no run folder, it has no config.toml; name the folder that "
        "`echelon train` wrote");
  }
  const fs::path parent = fs::absolute(arguments.out).parent_path();
  if (!fs::is_directory(parent, error)) {
    throw ConfigError(
        arguments.out + ": there is no folder " + parent.string() +
        "; make it first");
  }
  if (fs::is_directory(arguments.out, error)) {
    throw ConfigError(
        arguments.out + ": is a folder; name a file, as in model.safetensors");
  }
}

}  // namespace

void add_export(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "export", "write a run's weights as one safetensors file");
  command->footer("echelon export runs/first first.safetensors");
  auto arguments = std::make_shared<ExportArguments>();
  command->add_option("RUN", arguments->run, "the run folder")->required();
  command->add_option("OUT.safetensors", arguments->out, "the file to write")
      ->required();
  command->callback([&action, arguments] {
    action = [arguments]() -> int {
      check_export(*arguments);
      become_echelon_train({"export", arguments->run, arguments->out});
    };
  });
}

}  // namespace echelon::cli
