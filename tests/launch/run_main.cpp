// The launcher without the command line of `echelon`, for the tests here.
//   launch_run [-n N] [--nnodes [MIN:]MAX] [--node-rank R] [--master-addr A]
//     [--master-port P] [--token-file FILE] [--log DIR] [--grace-ms MS]
//     [--join-ms MS] [--plain] [--rank-zero] [--listen] [--max-restarts N]
//     [--last-step FILE] [--control NAME] [--joins yes] [--identity TEXT]
//     [--metrics ADDRESS] [--most-ranks N] [--tls yes] [--name-may-come yes] --
//     program args…
// --most-ranks: with more there is no layout. ECHELON_TEST_TLS is as --tls yes.
// A job with a control socket may be resized, to 4 ranks at most.
// With ECHELON_TEST_FORKS, ranks of launch_rank, and of sh through it, are
// forked from a fork server.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "echelon/error.h"
#include "echelon/launch/launch.h"

int main(int argc, char** argv) {
  echelon::launch::LaunchOptions options;
  options.tls = std::getenv("ECHELON_TEST_TLS") != nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--") {
      options.command.assign(argv + i + 1, argv + argc);
      break;
    }
    if (word == "--plain") {
      options.terminal = echelon::launch::Terminal::plain;
    } else if (word == "--rank-zero") {
      options.terminal = echelon::launch::Terminal::rank_zero;
    } else if (word == "--listen") {
      options.listen_early = true;
    } else if (i + 1 < argc) {
      const std::string value = argv[++i];
      const auto number = [&] { return std::atoi(value.c_str()); };
      if (word == "-n") options.num_ranks = number();
      if (word == "--nnodes") {
        const size_t colon = value.find(':');
        if (colon != std::string::npos) options.least_nodes = number();
        options.num_nodes = std::atoi(
            value.c_str() + (colon == std::string::npos ? 0 : colon + 1));
      }
      if (word == "--joins") options.joins = true;
      if (word == "--tls") options.tls = true;
      if (word == "--name-may-come") options.name_may_come = true;
      if (word == "--identity") options.identity = value;
      if (word == "--most-ranks") {
        options.resize = [most = number()](int num_ranks) {
          if (num_ranks > most) throw echelon::ConfigError("too many ranks");
          return "dp=" + std::to_string(num_ranks);
        };
        options.use_layout = [](const std::string& layout, bool) {
          std::fprintf(stderr, "layout %s\n", layout.c_str());
        };
      }
      if (word == "--node-rank") options.node_rank = number();
      if (word == "--master-addr") options.master_addr = value;
      if (word == "--master-port") options.master_port = number();
      if (word == "--token-file") options.token_file = value;
      if (word == "--log") options.log_dir = value;
      if (word == "--max-restarts") options.max_restarts = number();
      if (word == "--metrics") options.metrics.address = value;
      if (word == "--control") {
        options.control = [value] { return value; };
        options.resize = [](int num_ranks) {
          if (num_ranks > 4) throw echelon::ConfigError("4 ranks at most");
          return "dp=" + std::to_string(num_ranks);
        };
      }
      if (word == "--last-step") {
        options.last_step = [value] {
          int64_t step = 0;
          std::ifstream(value) >> step;
          return step;
        };
      }
      if (word == "--grace-ms") {
        options.grace = std::chrono::milliseconds(number());
      }
      if (word == "--join-ms") {
        options.join_timeout = std::chrono::milliseconds(number());
      }
    }
  }
  if (std::getenv("ECHELON_TEST_FORKS") != nullptr) {
    const std::string rank =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() /
        "launch_rank";
    auto& command = options.command;
    if (!command.empty() && command[0] == "sh") {
      command.insert(command.begin(), {rank, "exec"});
    }
    options.fork_ranks = !command.empty() && command[0] == rank;
  }
  try {
    return echelon::launch::run(options);
  } catch (const echelon::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
