// The files of attempt 2 in a job's folder: start-2.json, written by the daemon
// before the keeper starts; attempt-2, by the keeper, or by a daemon that calls
// the attempt off; exit-2, by the keeper. attempt-2 appears whole: it is a link
// to a file that is complete.
//
// The keeper is the subreaper of the command's processes, so that it can end
// those that the command leaves behind: their devices are given to another job.
#include "echelon/pool/keeper.h"

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {  // glibc 2.36 forgot it
#include <sys/pidfd.h>
}

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

extern char** environ;

namespace echelon::pool {
namespace {

namespace fs = std::filesystem;

constexpr int kKill = SIGUSR1;  // to the keeper: SIGKILL to the command
constexpr int kNoSuchProgram = 127;
constexpr int kNotStarted = 126;

fs::path file_of(const Attempt& attempt, const char* name) {
  return attempt.folder / format("{}-{}", name, attempt.number);
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

// When the process started, in ticks since the machine did; -1: there is none.
int64_t start_time(pid_t pid) {
  std::ifstream file(format("/proc/{}/stat", pid));
  std::stringstream text;
  text << file.rdbuf();
  const std::string stat = text.str();
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return -1;
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  constexpr int kStartTime = 22, kFirst = 3;
  for (int i = kFirst; i <= kStartTime; ++i) fields >> field;
  return fields ? std::strtoll(field.c_str(), nullptr, 10) : -1;
}

// Makes `path` with this content, unless it exists; whether it made it.
bool make_file(const fs::path& path, const std::string& text) {
  fs::path whole = path;
  whole += format(".{}", ::getpid());
  write_file_atomically(whole, text);
  const int code = ::link(whole.c_str(), path.c_str());
  const int error = errno;
  ::unlink(whole.c_str());
  if (code != 0 && error != EEXIST) {
    throw Error(
        format("cannot make {}: {}", path.string(), std::strerror(error)));
  }
  return code == 0;
}

sigset_t keeper_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGCHLD, kKill}) {
    sigaddset(&set, signal);
  }
  return set;
}

[[noreturn]] void fail_to_start(const std::string& what, int error, int code) {
  const std::string text =
      format("echelon pool: {}: {}\n", what, std::strerror(error));
  (void)!::write(2, text.data(), text.size());
  _exit(code);
}

void become(int64_t user) {
  if (::geteuid() != 0 || user == 0) return;
  const auto uid = static_cast<uid_t>(user);
  const passwd* entry = ::getpwuid(uid);
  const gid_t group =
      entry == nullptr ? static_cast<gid_t>(uid) : entry->pw_gid;
  const int groups = entry == nullptr ? ::setgroups(0, nullptr)
                                      : ::initgroups(entry->pw_name, group);
  if (groups != 0 || ::setgid(group) != 0 || ::setuid(uid) != 0) {
    fail_to_start(format("user {}", user), errno, kNotStarted);
  }
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (auto& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

// In the child of the keeper.
[[noreturn]] void run(Program& program, pid_t keeper) {
  ::setsid();
  ::umask(0022);  // the daemon's own is for its secrets
  become(program.user);
  // After the change of the user, which would forget it.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != keeper) _exit(kNotStarted);
  const int log = ::open(
      program.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW, 0644);
  if (log >= 0) {
    ::dup2(log, 1);
    ::dup2(log, 2);
    if (log > 2) ::close(log);
  }
  if (::chdir(program.folder.c_str()) != 0) {
    fail_to_start(program.folder, errno, kNotStarted);
  }
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  auto environment = pointers(program.environment);
  environ = environment.data();
  auto words = pointers(program.command);
  ::execvp(words[0], words.data());
  const int error = errno;
  fail_to_start(
      program.command[0], error,
      error == ENOENT ? kNoSuchProgram : kNotStarted);
}

std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  DIR* folder = ::opendir("/proc");
  if (folder == nullptr) return children;
  while (const dirent* entry = ::readdir(folder)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::ifstream file(format("/proc/{}/stat", pid));
    std::stringstream text;
    text << file.rdbuf();
    const std::string stat = text.str();
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos) continue;
    std::istringstream fields(stat.substr(name_end + 1));
    std::string state;
    pid_t of = 0;
    if (fields >> state >> of && of == parent) children.push_back(pid);
  }
  ::closedir(folder);
  return children;
}

// What the command left behind became children of the keeper.
void end_children() {
  while (true) {
    for (const pid_t pid : children_of(::getpid())) ::kill(pid, SIGKILL);
    const pid_t pid = ::waitpid(-1, nullptr, 0);
    if (pid < 0 && errno == ECHILD) return;
  }
}

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// Waits for the command's end, and does what the daemon asks meanwhile.
int wait_for(pid_t command) {
  const sigset_t signals = keeper_signals();
  while (true) {
    siginfo_t info{};
    const int signal = ::sigwaitinfo(&signals, &info);
    if (signal == kKill) {
      ::kill(-command, SIGKILL);
      ::kill(command, SIGKILL);
    } else if (signal > 0 && signal != SIGCHLD) {
      // Until it has made its session there is no group of it.
      if (::kill(-command, SIGTERM) != 0) ::kill(command, SIGTERM);
    }
    for (int status; true;) {
      const pid_t pid = ::waitpid(-1, &status, WNOHANG);
      if (pid <= 0) break;
      if (pid == command) return exit_code_of(status);
    }
  }
}

std::string own_path() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).string();
}

nlohmann::json read_json(const fs::path& path) {
  return nlohmann::json::parse(read_text_file(path));
}

}  // namespace

void write_program(const Attempt& attempt, const Program& program) {
  const nlohmann::json json = {
      {"command", program.command},
      {"environment", program.environment},
      {"folder", program.folder},
      {"user", program.user},
      {"log", program.log}};
  fs::path path = file_of(attempt, "start");
  path += ".json";
  write_file_atomically(
      path,
      json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

pid_t start_keeper(const Attempt& attempt) {
  std::vector<std::string> words = {
      own_path(), "pool", "keep", attempt.folder.string(),
      std::to_string(attempt.number)};
  const auto arguments = pointers(words);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  for (const int file : {0, 1, 2}) {
    posix_spawn_file_actions_addopen(&files, file, "/dev/null", O_RDWR, 0);
  }
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(
      &attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  // A signal waits until the keeper can handle it.
  const sigset_t signals = keeper_signals();
  posix_spawnattr_setsigmask(&attributes, &signals);
  pid_t pid = -1;
  const int error = ::posix_spawn(
      &pid, words[0].c_str(), &files, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    throw Error(format("cannot start {}: {}", words[0], std::strerror(error)));
  }
  return pid;
}

int keep(const Attempt& attempt) {
  const sigset_t signals = keeper_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGCHLD, SIG_DFL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  fs::path start = file_of(attempt, "start");
  start += ".json";
  const auto json = read_json(start);
  Program program;
  json.at("command").get_to(program.command);
  json.at("environment").get_to(program.environment);
  json.at("folder").get_to(program.folder);
  json.at("user").get_to(program.user);
  json.at("log").get_to(program.log);
  const pid_t self = ::getpid();
  if (!make_file(
          file_of(attempt, "attempt"),
          nlohmann::json{
              {"pid", self}, {"start", start_time(self)}, {"boot", boot_id()}}
              .dump())) {
    return 0;  // called off
  }
  const pid_t command = ::fork();
  if (command == 0) run(program, self);
  const int code = command < 0 ? kNotStarted : wait_for(command);
  end_children();
  // On a full disk the job counts as running until its end is written.
  while (true) {
    try {
      write_file_atomically(
          file_of(attempt, "exit"), std::to_string(code) + "\n");
      return 0;
    } catch (const Error&) {
      std::error_code error;
      if (!fs::exists(attempt.folder, error)) return 1;
      ::sleep(1);
    }
  }
}

Found find(const Attempt& attempt) {
  Found found;
  const fs::path exit = file_of(attempt, "exit");
  const auto ended = [&] {
    std::ifstream file(exit);
    if (!(file >> found.exit_code)) return false;
    found.kind = Found::Kind::ended;
    return true;
  };
  if (ended()) return found;
  const fs::path record = file_of(attempt, "attempt");
  std::error_code error;
  if (!fs::exists(record, error)) return found;
  const auto json = read_json(record);
  const auto pid = json.at("pid").get<pid_t>();
  found.kind = Found::Kind::lost;
  if (json.at("boot") != boot_id()) {
    found.kind = Found::Kind::rebooted;
    return found;
  }
  FileDescriptor keeper(::pidfd_open(pid, 0));
  if (keeper.is_open() && start_time(pid) == json.at("start")) {
    found.kind = Found::Kind::running;
    found.keeper = std::move(keeper);
    return found;
  }
  ended();  // since it was looked for
  return found;
}

bool call_off(const Attempt& attempt) {
  return make_file(
      file_of(attempt, "attempt"),
      nlohmann::json{{"pid", 0}, {"start", 0}, {"boot", ""}}.dump());
}

void ask_to_end(const Found& found) {
  (void)::pidfd_send_signal(found.keeper.fd(), SIGTERM, nullptr, 0);
}

void kill_all(const Found& found) {
  (void)::pidfd_send_signal(found.keeper.fd(), kKill, nullptr, 0);
}

}  // namespace echelon::pool
