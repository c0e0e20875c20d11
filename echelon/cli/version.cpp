#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "echelon/cli/build_info.h"
#include "echelon/cli/command_line.h"

namespace echelon::cli {

void add_version(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("version", "print the version");
  command->footer("echelon version\nechelon version --json");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "print it as JSON");
  command->callback([&action, json] {
    action = [json] {
      if (*json) {
        std::cout
            << nlohmann::
                   ordered_json{{"version", build_info::kVersion}, {"compiler", build_info::kCompiler}, {"build_type", build_info::kBuildType}}
                       .dump()
            << "\n";
      } else {
        std::cout << "echelon " << build_info::kVersion << "\n";
      }
      return 0;
    };
  });
}

}  // namespace echelon::cli
