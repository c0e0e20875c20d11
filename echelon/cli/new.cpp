// `echelon new`: a project with a model of one's own. Its files are those of
// project/, with the project's name in the place of @NAME@.
#include <filesystem>
#include <iostream>
#include <string>
#include <string_view>

#include "echelon/cli/command_line.h"
#include "echelon/cli/new_folder.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cli {

namespace project {
extern const std::string_view project_cmake, model_cpp, train_toml, README_md,
    gitignore;
}  // namespace project

namespace {

struct NewArguments {
  std::string folder;
};

// CMake's targets, file names and TOML all take such a name.
void check_project_name(const std::string& name) {
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  constexpr std::string_view kOthers = "0123456789_-";
  const bool fits =
      !name.empty() && kLetters.find(name[0]) != std::string_view::npos &&
      name.find_first_not_of(std::string(kLetters) + std::string(kOthers)) ==
          std::string::npos &&
      name != "test" && name != "all" && name != "clean";
  if (fits) return;
  throw ConfigError(format(
      "echelon new {}: a project's name begins with a letter and has letters, "
      "digits, _ and -, and is no target of CMake's own; name it otherwise",
      name));
}

std::string with_name(std::string_view form, const std::string& name) {
  constexpr std::string_view kPlace = "@NAME@";
  std::string text(form);
  for (size_t at = 0; (at = text.find(kPlace, at)) != std::string::npos;) {
    text.replace(at, kPlace.size(), name);
    at += name.size();
  }
  return text;
}

int make_project(const NewArguments& arguments) {
  std::filesystem::path out(arguments.folder);
  if (!out.has_filename()) out = out.parent_path();  // "mine/"
  const std::string name = out.filename().string();
  check_project_name(name);
  NewFolder folder(out);
  folder.write("CMakeLists.txt", with_name(project::project_cmake, name));
  folder.write("model.cpp", with_name(project::model_cpp, name));
  folder.write("train.toml", with_name(project::train_toml, name));
  folder.write("README.md", with_name(project::README_md, name));
  folder.write(".gitignore", with_name(project::gitignore, name));
  folder.move_into_place();
  std::cout << format(
      "made {}\n"
      "  cd {}\n"
      "  cmake -B build && cmake --build build\n"
      "  echelon train train.toml -n 2\n",
      out.string(), out.string());
  return 0;
}

}  // namespace

void add_new(Command& root) {
  auto [command, arguments] = root.add(
      "new",
      "make a project with a model, data and a loss of your own: CMake, "
      "configuration, tests",
      "echelon new mine\n"
      "cd mine && cmake -B build && cmake --build build\n"
      "echelon train train.toml -n 2",
      make_project);
  command.positional("NAME", arguments.folder, "the folder to make");
}

}  // namespace echelon::cli
