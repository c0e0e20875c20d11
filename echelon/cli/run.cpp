#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/error.h"
#include "echelon/launch/launch.h"

namespace echelon::cli {
namespace {

struct RunArguments {
  std::string num_ranks = "1";
  std::string num_nodes = "1";
  std::string node_rank = "0";
  std::string master_addr;
  std::string master_port;
  std::string log_dir;
  bool no_prefix = false;
  std::vector<std::string> program;
};

int run(const RunArguments& arguments) {
  launch::LaunchOptions options;
  options.num_ranks =
      static_cast<int>(parse_count("-n", arguments.num_ranks, 1, kMaxRanks));
  options.num_nodes = static_cast<int>(
      parse_count("--nnodes", arguments.num_nodes, 1, 1 << 16));
  options.node_rank = static_cast<int>(parse_count(
      "--node-rank", arguments.node_rank, 0, options.num_nodes - 1));
  if (!arguments.master_port.empty()) {
    options.master_port = static_cast<int>(
        parse_count("--master-port", arguments.master_port, 1, 65535));
  }
  if (options.num_nodes > 1 && arguments.master_addr.empty()) {
    throw ConfigError(
        "--nnodes " + arguments.num_nodes +
        ": needs --master-addr, the address of node 0 as the other hosts reach "
        "it");
  }
  options.master_addr = arguments.master_addr;
  options.log_dir = arguments.log_dir;
  if (arguments.no_prefix) options.terminal = launch::Terminal::plain;
  options.command = arguments.program;
  return launch::run(options);
}

}  // namespace

void add_run(Command& root) {
  Command command = root.add(
      "run", "start your own program on several ranks",
      "echelon run -n 4 -- ./program --its-own-flag\n"
      "echelon run -n 4 --log-dir log -- python3 train.py\n"
      "echelon run -n 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- "
      "./program");
  auto arguments = std::make_shared<RunArguments>();
  const auto option = [&](const char* name, std::string& value,
                          const char* type, const char* help) {
    command.option(name, value, type, help);
  };
  option(
      "-n", arguments->num_ranks, "RANKS", "ranks on this host (default: 1)");
  option(
      "--nnodes", arguments->num_nodes, "HOSTS",
      "hosts of the job (default: 1)");
  option(
      "--node-rank", arguments->node_rank, "RANK",
      "rank of this host, from 0 (default: 0)");
  option(
      "--master-addr", arguments->master_addr, "ADDRESS",
      "address of node 0, when there are several hosts");
  option(
      "--master-port", arguments->master_port, "PORT",
      "port of rank 0's store (default: a free one, on one host)");
  option(
      "--log-dir", arguments->log_dir, "DIR",
      "write each rank's output to DIR/rank-N.log");
  command.flag(
      "--no-prefix", arguments->no_prefix,
      "print lines without the rank in front");
  command.act_on_program(
      arguments->program, [arguments] { return run(*arguments); });
}

}  // namespace echelon::cli
