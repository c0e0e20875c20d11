#include <filesystem>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/local_cluster.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct BenchArguments {
  HostArguments hosts;
  std::string backends = "local,gloo";
  std::string num_ranks = "2";
  std::string bytes = "4KiB,1MiB,64MiB";
  std::string ranks = "processes";
  bool json = false;
};

struct MachineArguments {
  std::string save;
  std::string num_ranks = "2";
  bool json = false;
};

fs::path chosen_path(const std::string& save) {
  const auto path = fs::absolute(save);
  std::error_code error;
  if (fs::is_directory(path, error) ||
      !fs::is_directory(path.parent_path(), error)) {
    throw ConfigError(
        "--save " + save +
        ": must be a file in a folder that exists, as in --save here.toml");
  }
  return path;
}

/// The path at which predictions of runs look for the file. Makes its folder.
fs::path default_path(int64_t ranks) {
  const auto path = cluster::saved_cluster_path(ranks);
  if (path.empty()) {
    throw ConfigError(
        "--save: neither XDG_CONFIG_HOME nor HOME is set; name a file, as in "
        "--save here.toml");
  }
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
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
  const auto path = arguments.save.empty() ? default_path(num_ranks)
                                           : chosen_path(arguments.save);
  std::vector<std::string> command = {
      "bench", "machine", "--save", path.string()};
  if (arguments.json) command.push_back("--json");
  return launch_echelon_train(command, num_ranks, RankKind::processes);
}

int bench(const BenchArguments& arguments) {
  for (const auto& backend : split(arguments.backends, ',')) {
    check_choice("--backend", backend, {"local", "gloo", "nccl"});
  }
  std::vector<std::string> sizes;
  for (const auto& bytes : split(arguments.bytes, ',')) {
    sizes.push_back(
        std::to_string(parse_size("--bytes", bytes, 4, int64_t{1} << 36)));
  }
  check_choice("--ranks", arguments.ranks, {"processes", "threads"});
  std::vector<std::string> command = {"bench",     "collectives",
                                      "--backend", arguments.backends,
                                      "--bytes",   join(sizes, ",")};
  if (arguments.json) command.push_back("--json");
  const launch::LaunchOptions options = host_options(arguments.hosts);
  const bool threads = arguments.ranks == "threads";
  if (threads && options.num_nodes > 1) throw ConfigError(kThreadsOnHosts);
  return launch_echelon_train(
      command,
      parse_count("-n", arguments.num_ranks, 1, kMaxRanks) * options.num_nodes,
      threads ? RankKind::threads : RankKind::processes, options);
}

}  // namespace

void add_bench(Command& root) {
  Command group = root.add(
      "bench", "measure this machine",
      "echelon bench --save -n 2              reports then predict runs of 2 "
      "ranks\n"
      "echelon bench --save here.toml -n 2    a file for --cluster\n"
      "echelon bench collectives -n 2 --backend local,gloo");
  auto machine = std::make_shared<MachineArguments>();
  group.option_with_optional_value(
      "--save", machine->save, "[FILE]",
      "measure matmuls, memory and links of this machine, all ranks at once, "
      "and write them as a cluster file; without FILE, as the one from which "
      "reports predict runs of so many ranks here");
  group.option("-n", machine->num_ranks, "RANKS", "ranks (default: 2)");
  group.flag("--json", machine->json, "print the measurements as JSON");
  group.act([group, machine] {
    if (!group.given("--save")) {
      throw ConfigError(
          "echelon bench: --save, or what to measure, is required; `echelon "
          "bench --help` has examples");
    }
    return bench_machine(*machine);
  });

  auto [command, arguments] = group.add(
      "collectives",
      "time and bandwidth of each collective, backend and size, in the terms "
      "of nccl-tests",
      "echelon bench collectives -n 2\n"
      "echelon bench collectives -n 4 --backend local --bytes 64MiB --json",
      bench);
  command.option(
      "-n", arguments.num_ranks, "RANKS", "ranks of each host (default: 2)");
  add_host_arguments(command, arguments.hosts);
  command.option(
      "--backend", arguments.backends, "NAME,…",
      "which of local, gloo and nccl (default: local,gloo)");
  command.option(
      "--bytes", arguments.bytes, "BYTES,…",
      "bytes of each rank's tensor (default: 4KiB,1MiB,64MiB)");
  command.option(
      "--ranks", arguments.ranks, "processes|threads",
      "run each rank as a process, or as a thread of one process");
  command.flag("--json", arguments.json, "print the rows as JSON");
}

}  // namespace echelon::cli
