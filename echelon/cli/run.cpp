#include <CLI/CLI.hpp>
#include <memory>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
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

std::vector<std::string>& program_behind_dashes() {
  static std::vector<std::string> program;
  return program;
}

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
        ": needs --master-addr, the address of node 0 as the "
        "other hosts reach it");
  }
  options.master_addr = arguments.master_addr;
  options.log_dir = arguments.log_dir;
  if (arguments.no_prefix) options.terminal = launch::Terminal::plain;
  options.command = arguments.program;
  return launch::run(options);
}

}  // namespace

void set_program(const std::vector<std::string>& program) {
  program_behind_dashes() = program;
}

void add_run(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "run", "start a program of your own on as many ranks as asked");
  command->footer(
      "echelon run -n 4 -- ./program --its-own-flag\n"
      "echelon run -n 4 --log-dir log -- python3 train.py\n"
      "echelon run -n 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- "
      "./program");
  auto arguments = std::make_shared<RunArguments>();
  command->add_option("-n", arguments->num_ranks, "ranks on this host (1)")
      ->type_name("RANKS");
  command->add_option("--nnodes", arguments->num_nodes, "hosts in the job (1)")
      ->type_name("HOSTS");
  command
      ->add_option(
          "--node-rank", arguments->node_rank, "which of them this is, from 0")
      ->type_name("RANK");
  command
      ->add_option(
          "--master-addr", arguments->master_addr,
          "address of node 0, when there are several hosts")
      ->type_name("ADDRESS");
  command
      ->add_option(
          "--master-port", arguments->master_port,
          "port of rank 0's store; on one host a free one is taken")
      ->type_name("PORT");
  command
      ->add_option(
          "--log-dir", arguments->log_dir,
          "write each rank's output to DIR/rank-N.log")
      ->type_name("DIR");
  command->add_flag(
      "--no-prefix", arguments->no_prefix,
      "show lines without the rank in front");
  command->prefix_command();
  command->callback([&action, arguments, command] {
    auto program = command->remaining();
    const auto& behind = program_behind_dashes();
    if (!program.empty() && (program[0][0] == '-' || !behind.empty())) {
      throw CLI::ExtrasError("run", program);
    }
    arguments->program = program.empty() ? behind : program;
    if (arguments->program.empty()) {
      throw CLI::ValidationError(
          "no program is named; put it last, as in `echelon run -n 4 -- "
          "./program`");
    }
    action = [arguments] { return run(*arguments); };
  });
}

}  // namespace echelon::cli
