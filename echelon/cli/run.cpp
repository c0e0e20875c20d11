#include <filesystem>
#include <memory>
#include <string>

#include "echelon/cli/arguments.h"
#include "echelon/cli/job_hosts.h"
#include "echelon/cli/programs.h"
#include "echelon/cli/start_on_hosts.h"
#include "echelon/error.h"
#include "echelon/launch/launch.h"

namespace echelon::cli {
namespace {

struct RunArguments {
  std::string num_ranks;
  HostArguments hosts;
  std::string log_dir;
  std::string max_restarts = "0";
  std::string metrics_address, metrics_file;
  bool no_prefix = false;
  std::vector<std::string> program;
};

int run(const RunArguments& given) {
  RunArguments arguments = given;
  const JobHosts hosts = find_hosts(arguments.hosts);
  launch::LaunchOptions options =
      host_options(arguments.hosts, HostsOf::elastic);
  if (arguments.num_ranks.empty()) {
    arguments.num_ranks = std::to_string(ranks_of_each(hosts));
  }
  say_ranks(hosts, arguments.num_ranks);
  options.num_ranks =
      static_cast<int>(parse_count("-n", arguments.num_ranks, 1, kMaxRanks));
  if (hosts.by != JobHosts::By::started) {
    return start_on_hosts(
        hosts, arguments.hosts, "run",
        given.num_ranks.empty() ? arguments.num_ranks : "");
  }
  options.log_dir = arguments.log_dir;
  options.max_restarts = parse_max_restarts(arguments.max_restarts);
  if (arguments.no_prefix) options.terminal = launch::Terminal::plain;
  options.command = arguments.program;
  options.metrics.address = arguments.metrics_address;
  options.metrics.text_file = arguments.metrics_file;
  if (!arguments.program.empty()) {
    options.metrics.run =
        std::filesystem::path(arguments.program[0]).filename().string();
  }
  return launch::run(options);
}

}  // namespace

void add_run(Command& root) {
  Command command = root.add(
      "run", "start your own program on several ranks",
      "echelon run -n 4 -- ./program --its-own-flag\n"
      "echelon run -n 4 --log-dir log -- python3 train.py\n"
      "echelon run -n 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 -- "
      "./program\n"
      "echelon run -n 8 --nnodes 2:4 --join 10.0.0.1 -- ./program\n"
      "echelon run -n 8 --hosts a,b -- ./program   on both, by ssh");
  auto arguments = std::make_shared<RunArguments>();
  command.option(
      "-n", arguments->num_ranks, "RANKS",
      "ranks on this host (default: 1, or what the engine says that has "
      "started the job)");
  add_host_arguments(command, arguments->hosts, HostsOf::elastic);
  command.option(
      "--log-dir", arguments->log_dir, "DIR",
      "write each rank's output to DIR/rank-N.log");
  command.option(
      "--max-restarts", arguments->max_restarts, "N",
      "start all ranks again, up to N times, when one of them fails (default: "
      "0)");
  add_metrics_arguments(
      command, arguments->metrics_address, arguments->metrics_file);
  command.flag(
      "--no-prefix", arguments->no_prefix,
      "print lines without the rank in front");
  command.act_on_program(
      arguments->program, [arguments] { return run(*arguments); });
}

}  // namespace echelon::cli
