#include "echelon/launch/checks.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::launch {
namespace {

template <typename... Values>
[[noreturn]] void refuse(
    std::type_identity_t<detail::FormatPattern<sizeof...(Values)>> why,
    const Values&... values) {
  throw ConfigError("[launch] " + format(why, values...));
}

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

// Looks in PATH. Returns a file that may not be executed when there is no
// other, for a better message.
std::string look_up(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/bin:/bin");
  std::string forbidden;
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = (folder.empty() ? "." : folder) + "/" + program;
    if (is_file(file)) {
      if (access(file.c_str(), X_OK) == 0) return file;
      forbidden = file;
    }
  }
  if (!forbidden.empty()) return forbidden;
  refuse(
      "no program \"{}\" in PATH{}; a path with a slash names a file", program,
      is_file(program) ? "; there is one here: ./" + program : "");
}

// "#!/usr/bin/env python3": the first word must exist, and be executable.
void check_first_line(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string start(2, '\0');
  if (!file.read(start.data(), 2)) {
    if (file.eof()) refuse("{} is empty: not a program", path);
    return;  // executable but not readable is allowed
  }
  if (start != "#!") return;
  std::string line;
  std::getline(file, line);
  const bool returns = !line.empty() && line.back() == '\r';
  // The kernel takes everything up to a blank, including a carriage return.
  line.erase(0, line.find_first_not_of(" \t"));
  const std::string interpreter = line.substr(0, line.find_first_of(" \t"));
  if (access(interpreter.c_str(), X_OK) != 0) {
    refuse(
        "{} asks for \"{}{}\" in its first line, which is not there; {}", path,
        interpreter.substr(0, interpreter.find('\r')), returns ? "\\r" : "",
        returns ? "the line ends with a carriage return, `dos2unix` removes it"
                : "install it or change the line");
  }
}

}  // namespace

void check(const LaunchOptions& o) {
  if (o.command.empty() || o.command[0].empty()) {
    refuse(
        "no program to run; it comes after --, as in: echelon run -n 2 -- "
        "./program");
  }
  if (o.num_ranks < 1 || o.num_ranks > kMaxRanksPerHost) {
    refuse(
        "-n {}: ranks per host must be 1 to {}", o.num_ranks, kMaxRanksPerHost);
  }
  if (o.num_nodes < 1) refuse("--nnodes {}: must be 1 or more", o.num_nodes);
  if (o.node_rank < 0 || o.node_rank >= o.num_nodes) {
    refuse(
        "--node-rank {}: with --nnodes {} it must be 0 to {}{}", o.node_rank,
        o.num_nodes, o.num_nodes - 1,
        o.num_nodes == 1 ? "; did you mean to give --nnodes?" : "");
  }
  if (o.num_nodes > 1 && o.master_addr.empty()) {
    refuse(
        "--nnodes {} needs --master-addr: the address of the host with "
        "--node-rank 0",
        o.num_nodes);
  }
  if (o.master_port < 0 || o.master_port > 65535) {
    refuse("--master-port {}: must be 0 to 65535", o.master_port);
  }
  if (o.max_restarts < 0) {
    refuse("--max-restarts {}: must be 0 or more", o.max_restarts);
  }
  if (o.least_nodes < 0 || o.least_nodes > o.num_nodes) {
    refuse(
        "--nnodes {}:{}: the first number, of the fewest hosts, must be from 1 "
        "to the second",
        o.least_nodes, o.num_nodes);
  }
  if (o.grace.count() < 0) {
    refuse("grace of {} ms: must be 0 or more", o.grace.count());
  }
}

std::string find_program(const std::string& program) {
  const std::string path =
      program.find('/') == std::string::npos ? look_up(program) : program;
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    refuse("{} is a folder, not a program", path);
  }
  if (access(path.c_str(), F_OK) != 0) {
    refuse("no program {}: {}", path, std::strerror(errno));
  }
  if (access(path.c_str(), X_OK) != 0) {
    refuse(
        "{} may not be executed; `chmod +x {}` allows it, or put its "
        "interpreter in front",
        path, path);
  }
  check_first_line(path);
  return path;
}

std::string explain_exec_error(const std::string& path, int error) {
  const char* reason = std::strerror(error);
  switch (error) {
    case ENOENT:
      reason =
          "its loader or interpreter is not on this system; it may be built "
          "for another one";
      break;
    case ENOEXEC:
      reason =
          "it is not a program of this machine; a script needs #! and its "
          "interpreter in the first line";
      break;
    case E2BIG:
      reason = "the arguments and the environment together are too long";
      break;
    case ETXTBSY:
      reason = "it is open for writing; is a build still running?";
      break;
  }
  return format("[launch] cannot start {}: {}", path, reason);
}

}  // namespace echelon::launch
