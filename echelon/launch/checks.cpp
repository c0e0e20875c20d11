#include "echelon/launch/checks.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "echelon/error.h"

namespace echelon::launch {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw ConfigError("[launch] " + text);
}

bool is_file(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_folder(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

// Looks in PATH; a file there that may not be executed is remembered, to say
// so.
std::string look_up(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/bin:/bin");
  std::string forbidden;
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = (folder.empty() ? "." : folder) + "/" + program;
    if (is_file(file)) {
      if (access(file.c_str(), X_OK) == 0) {
        return file;
      }
      forbidden = file;
    }
  }
  if (!forbidden.empty()) {
    return forbidden;
  }
  refuse(
      "no program \"" + program + "\" in PATH" +
      (is_file(program) ? "; there is one here: ./" + program : "") +
      "; a path with a slash names a file");
}

// "#!/usr/bin/env python3": the first word must exist, and be executable.
void check_first_line(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string start(2, '\0');
  if (!file.read(start.data(), 2)) {
    if (file.eof()) {
      refuse(path + " is empty: not a program");
    }
    return;  // executable but not readable is allowed
  }
  if (start != "#!") {
    return;
  }
  std::string line;
  std::getline(file, line);
  const bool returns = !line.empty() && line.back() == '\r';
  // The kernel takes all up to a blank, a carriage return too.
  line.erase(0, line.find_first_not_of(" \t"));
  const std::string interpreter = line.substr(0, line.find_first_of(" \t"));
  if (access(interpreter.c_str(), X_OK) != 0) {
    refuse(
        path + " asks for \"" + interpreter.substr(0, interpreter.find('\r')) +
        (returns ? "\\r" : "") + "\" in its first line, which is not there" +
        (returns ? "; the line ends with a carriage return, `dos2unix` "
                   "removes it"
                 : "; install it or change the line"));
  }
}

}  // namespace

void check(const LaunchOptions& o) {
  const auto text = [](auto value) { return std::to_string(value); };
  if (o.command.empty() || o.command[0].empty()) {
    refuse(
        "no program to run; it comes after --, as in: echelon run -n 2 -- "
        "./program");
  }
  if (o.num_ranks < 1 || o.num_ranks > kMaxRanksPerHost) {
    refuse(
        "-n " + text(o.num_ranks) + ": ranks per host must be 1 to " +
        text(kMaxRanksPerHost));
  }
  if (o.num_nodes < 1) {
    refuse("--nnodes " + text(o.num_nodes) + ": must be 1 or more");
  }
  if (o.node_rank < 0 || o.node_rank >= o.num_nodes) {
    refuse(
        "--node-rank " + text(o.node_rank) + ": with --nnodes " +
        text(o.num_nodes) + " it must be 0 to " + text(o.num_nodes - 1) +
        (o.num_nodes == 1 ? "; did you mean to give --nnodes?" : ""));
  }
  if (o.num_nodes > 1 && o.master_addr.empty()) {
    refuse(
        "--nnodes " + text(o.num_nodes) +
        " needs --master-addr: the address of the host with --node-rank 0");
  }
  if (o.master_port < 0 || o.master_port > 65535) {
    refuse("--master-port " + text(o.master_port) + ": must be 0 to 65535");
  }
  if (o.grace.count() < 0) {
    refuse("grace of " + text(o.grace.count()) + " ms: must be 0 or more");
  }
}

std::string find_program(const std::string& program) {
  const std::string path =
      program.find('/') == std::string::npos ? look_up(program) : program;
  if (is_folder(path)) {
    refuse(path + " is a folder, not a program");
  }
  if (access(path.c_str(), F_OK) != 0) {
    refuse("no program " + path + ": " + std::strerror(errno));
  }
  if (access(path.c_str(), X_OK) != 0) {
    refuse(
        path + " may not be executed; `chmod +x " + path +
        "` allows it, or put its interpreter in front");
  }
  check_first_line(path);
  return path;
}

std::string explain_exec_error(const std::string& path, int error) {
  const std::string place = "[launch] cannot start " + path + ": ";
  switch (error) {
    case ENOENT:
      return place +
             "its loader or interpreter is not on this system; it may "
             "be built for another one";
    case ENOEXEC:
      return place +
             "it is not a program of this machine; a script needs #! "
             "and its interpreter in the first line";
    case E2BIG:
      return place + "the arguments and the environment together are too long";
    case ETXTBSY:
      return place + "it is open for writing; is a build still running?";
    default:
      return place + std::strerror(error);
  }
}

}  // namespace echelon::launch
