#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <sstream>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cluster/saved_cluster.h"
#include "echelon/error.h"
#include "echelon/launch/launch.h"
#include "echelon/text/nearest.h"

namespace echelon::cli {
namespace {

struct BenchArguments {
  std::string backends = "local,gloo";
  std::string num_ranks = "2";
  std::string bytes = "4096,1048576,67108864";
  std::string ranks = "processes";
  bool json = false;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> items;
  std::istringstream in(text);
  for (std::string item; std::getline(in, item, ',');) items.push_back(item);
  return items;
}

void check_choice(
    const std::string& flag, const std::string& word,
    const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), word) != choices.end()) return;
  std::string all;
  for (const auto& choice : choices) all += (all.empty() ? "" : ", ") + choice;
  throw ConfigError(
      flag + " " + word + ": must be one of " + all +
      config::did_you_mean(word, choices));
}

struct MachineArguments {
  std::string save;
  std::string num_ranks = "2";
  bool json = false;
};

std::filesystem::path chosen_path(const std::string& save) {
  const auto path = std::filesystem::absolute(save);
  std::error_code error;
  if (std::filesystem::is_directory(path, error) ||
      !std::filesystem::is_directory(path.parent_path(), error)) {
    throw ConfigError(
        "--save " + save +
        ": must be a file in a folder that exists, as in --save here.toml");
  }
  return path;
}

// Where predictions of runs look for it.
std::filesystem::path made_saved_cluster_path(int64_t ranks) {
  const auto path = saved_cluster_path(ranks);
  if (path.empty()) {
    throw ConfigError(
        "--save: neither XDG_CONFIG_HOME nor HOME is set; name a file, as in "
        "--save here.toml");
  }
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  if (error) {
    throw ConfigError(
        "--save: cannot make " + path.parent_path().string() + ": " +
        error.message() + "; name a file, as in --save here.toml");
  }
  return path;
}

int bench_machine(const MachineArguments& arguments) {
  const int64_t num_ranks =
      parse_count("-n", arguments.num_ranks, 1, kMaxRanks);
  const auto path = arguments.save.empty() ? made_saved_cluster_path(num_ranks)
                                           : chosen_path(arguments.save);
  launch::LaunchOptions options;
  options.command = {
      find_echelon_train(), "bench", "machine", "--save", path.string()};
  if (arguments.json) options.command.push_back("--json");
  options.num_ranks = static_cast<int>(num_ranks);
  options.terminal = launch::Terminal::rank_zero;
  options.listen_early = true;
  return launch::run(options);
}

int bench(const BenchArguments& arguments) {
  for (const auto& backend : split(arguments.backends)) {
    check_choice("--backend", backend, {"local", "gloo", "nccl"});
  }
  for (const auto& bytes : split(arguments.bytes)) {
    parse_count("--bytes", bytes, 4, int64_t{1} << 36);
  }
  check_choice("--ranks", arguments.ranks, {"processes", "threads"});
  const int64_t num_ranks =
      parse_count("-n", arguments.num_ranks, 1, kMaxRanks);

  launch::LaunchOptions options;
  options.command = {
      find_echelon_train(), "bench",   "collectives",  "--backend",
      arguments.backends,   "--bytes", arguments.bytes};
  if (arguments.json) options.command.push_back("--json");
  options.num_ranks = static_cast<int>(num_ranks);
  if (arguments.ranks == "threads") {
    options.command.insert(
        options.command.end(), {"--threads", std::to_string(num_ranks)});
    options.num_ranks = 1;
  }
  options.terminal = launch::Terminal::rank_zero;
  options.listen_early = true;
  return launch::run(options);
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  auto* group = app.add_subcommand("bench", "measure what this machine does");
  group->require_subcommand(0, 1);
  group->footer(
      "echelon bench --save -n 2              reports then predict runs of 2 "
      "ranks\n"
      "echelon bench --save here.toml -n 2    a file for --cluster\n"
      "echelon bench collectives -n 2 --backend local,gloo");
  auto machine = std::make_shared<MachineArguments>();
  group
      ->add_option(
          "--save", machine->save,
          "measure matrix products, memory and links of this machine, all "
          "ranks "
          "at once, and write them as a cluster file; without FILE, the one by "
          "which reports predict runs of so many ranks here")
      ->type_name("[FILE]")
      ->expected(0, 1);
  group->add_option("-n", machine->num_ranks, "ranks (2)")->type_name("RANKS");
  group->add_flag("--json", machine->json, "print what was measured as JSON");
  group->callback([&action, group, machine] {
    if (!group->get_subcommands().empty()) return;
    if (group->get_option("--save")->count() == 0) {
      throw CLI::RequiredError("--save, or what to measure,");
    }
    action = [machine] { return bench_machine(*machine); };
  });
  auto* command = group->add_subcommand(
      "collectives", "microseconds of each collective, backend and size");
  command->footer(
      "echelon bench collectives -n 2\n"
      "echelon bench collectives -n 4 --backend local --bytes 4096 --json");
  auto arguments = std::make_shared<BenchArguments>();
  command->add_option("-n", arguments->num_ranks, "ranks (2)")
      ->type_name("RANKS");
  command
      ->add_option(
          "--backend", arguments->backends,
          "which of local, gloo and nccl (local,gloo)")
      ->type_name("NAME,…");
  command
      ->add_option(
          "--bytes", arguments->bytes,
          "bytes of each rank's tensor (4096,1048576,67108864)")
      ->type_name("BYTES,…");
  command
      ->add_option(
          "--ranks", arguments->ranks,
          "each rank a process, or a thread of one process")
      ->type_name("processes|threads");
  command->add_flag("--json", arguments->json, "print the rows as JSON");
  command->callback([&action, arguments] {
    action = [arguments] { return bench(*arguments); };
  });
}

}  // namespace echelon::cli
