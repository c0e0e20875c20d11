// The launchers need the same few flags on every host, and one token. This
// command starts itself once more on each host: inside a job of Slurm by srun,
// which takes the token in its environment, and elsewhere by ssh, whose
// standard input takes it. No token is ever in a command line.
//
// The standard input of a host's ssh then has a line for each signal, and its
// end is SIGTERM: what runs on other hosts ends with this process, however it
// ends. Launchers tell each other of failures, so a host that ends is only
// followed where it could not tell.
#include "echelon/cli/start_on_hosts.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "echelon/authentication/token.h"
#include "echelon/error.h"
#include "echelon/launch/cause.h"
#include "echelon/launch/guard.h"
#include "echelon/launch/signals.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"

namespace echelon::cli {
namespace {

using authentication::kTokenVariable;
using Steady = std::chrono::steady_clock;
using Texts = std::vector<std::string>;

constexpr int kSshFailed = 255;
// How long the other launchers have to end by themselves after one has failed.
constexpr std::chrono::seconds kOthersEnd{10};
constexpr std::chrono::seconds kSecondSignal{2};

[[noreturn]] void become_srun(
    const HostArguments& arguments, const std::string& command,
    const std::string& num_ranks) {
  const std::string nodes = most_of(arguments.num_nodes);
  Texts words = {
      "srun", "--nodes=" + nodes, "--ntasks=" + nodes, "--ntasks-per-node=1",
      // The launcher needs all of its node, and says itself when the job fails.
      "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0",
      "--export=ALL"};
  if (arguments.num_nodes.find(':') != std::string::npos) {
    words.push_back("--no-kill");
  }
  // In a job that asks for devices for each task, a step has as many devices of
  // a node as tasks there, unless it asks for more: the launcher needs all.
  const bool by_task = std::getenv("SLURM_GPUS_PER_TASK") != nullptr ||
                       std::getenv("SLURM_TRES_PER_TASK") != nullptr;
  const char* devices = std::getenv("SLURM_GPUS_ON_NODE");
  if (by_task && devices != nullptr) {
    words.push_back(format("--gpus-per-node={}", devices));
  }
  for (const char* name :
       {"SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK",
        "SLURM_CPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"}) {
    ::unsetenv(name);
  }
  if (arguments.token_file.empty() && std::getenv(kTokenVariable) == nullptr) {
    ::setenv(kTokenVariable, authentication::Key::random().to_hex().c_str(), 1);
  }
  Texts more;
  if (!num_ranks.empty()) more = {"-n", num_ranks};
  const Texts own = command_with(own_command_line(), command, {}, more);
  words.insert(words.end(), own.begin(), own.end());
  std::cout.flush();
  ::execvp(words[0].c_str(), launch::argv_of(words).data());
  throw ConfigError(format(
      "[launch] srun, which starts the launchers of the other hosts: {}",
      std::strerror(errno)));
}

// What a host's shell is told: the folder, the token from the first line of the
// standard input, a process that passes on the signals of the others, and the
// launcher in this shell's place.
std::string remote_script(const Texts& command) {
  std::string script = format(
      "cd {} && IFS= read -r {} && export {} && exec 3<&0 </dev/null || exit 2"
      "; {{ while IFS= read -r s <&3; do kill -\"$s\" $$; done; kill -TERM $$; "
      "}} >/dev/null 2>&1 & exec",
      shell_word(std::filesystem::current_path().string()), kTokenVariable,
      kTokenVariable);
  for (const auto& word : command) script += " " + shell_word(word);
  return "exec sh -c " + shell_word(script + " 3<&-");
}

/// The launcher of a remote host, as its ssh shows it.
struct RemoteLauncher {
  std::string host;
  pid_t pid = -1;
  FileDescriptor ended;  // readable then
  FileDescriptor input;
  std::optional<int> exit_code;
};

RemoteLauncher
start_remote(const std::string& host, const Texts& words, std::string token) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw ConfigError(
        format("[launch] ssh {}: {}", host, std::strerror(errno)));
  }
  RemoteLauncher launcher;
  launcher.host = host;
  launcher.input = FileDescriptor(ends[1]);
  FileDescriptor input(ends[0]);
  const auto argv = launch::argv_of(words);
  launcher.pid = ::fork();
  if (launcher.pid == 0) {
    // A terminal's Ctrl-C is for this program, which passes it on. Without the
    // terminal an ssh that wants a password fails, and does not wait for one.
    ::setsid();
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::signal(SIGPIPE, SIG_DFL);
    ::signal(SIGXFSZ, SIG_DFL);
    ::dup2(input.fd(), 0);
    ::execvp(argv[0], argv.data());
    const std::string text =
        format("echelon: {}: {}\n", words[0], std::strerror(errno));
    (void)!::write(2, text.data(), text.size());
    ::_exit(127);
  }
  if (launcher.pid < 0) {
    throw ConfigError(
        format("[launch] ssh {}: {}", host, std::strerror(errno)));
  }
  launcher.ended = FileDescriptor(
      static_cast<int>(::syscall(SYS_pidfd_open, launcher.pid, 0)));
  if (!launcher.ended.is_open()) {
    throw ConfigError(format(
        "[launch] --hosts needs pidfd_open(), of Linux 5.3 and later: {}",
        std::strerror(errno)));
  }
  token += "\n";
  (void)!::write(launcher.input.fd(), token.data(), token.size());
  return launcher;
}

/// Follows the launchers of all hosts to the job's end.
class RemoteJob {
 public:
  RemoteJob(std::vector<RemoteLauncher> launchers, bool elastic)
      : launchers_(std::move(launchers)), elastic_(elastic) {}
  int run(launch::SignalFile& signals);

 private:
  void pass_on(int signal);
  void note_end(RemoteLauncher& launcher);
  bool all_ended() const;

  std::vector<RemoteLauncher> launchers_;
  bool elastic_;
  int exit_code_ = 0;   // of the first that failed
  int last_code_ = -1;  // of the last that its ssh has told
  std::optional<Steady::time_point> first_signal_;
  bool stopping_ = false;  // the others end, by themselves or at end_others_
  std::optional<Steady::time_point> end_others_;
};

bool RemoteJob::all_ended() const {
  return std::ranges::all_of(
      launchers_, [](const auto& one) { return one.exit_code.has_value(); });
}

void RemoteJob::pass_on(int signal) {
  const std::string line = launch::signal_name(signal).substr(3) + "\n";
  for (auto& one : launchers_) {
    if (one.exit_code) continue;
    (void)!::write(one.input.fd(), line.data(), line.size());
  }
}

void RemoteJob::note_end(RemoteLauncher& launcher) {
  int status = 0;
  ::waitpid(launcher.pid, &status, 0);
  const int code = launch::exit_code_of(status);
  launcher.exit_code = code;
  const bool lost = code == kSshFailed || WIFSIGNALED(status);
  if (!lost) last_code_ = code;
  if (code == 0) return;
  if (exit_code_ == 0) {
    exit_code_ = lost ? static_cast<int>(ExitCode::failure) : code;
  }
  const bool told = first_signal_ || stopping_;
  if (lost && !told) {
    std::cerr << format(
        "echelon: host {}: its ssh ended with code {}; {}\n", launcher.host,
        code,
        elastic_ ? "the others may go on" : "the others are told to stop");
  }
  if (elastic_ || told) return;
  stopping_ = true;
  end_others_ = Steady::now();
  // The launchers tell each other what has failed, unless one was lost.
  if (!lost) *end_others_ += kOthersEnd;
}

int RemoteJob::run(launch::SignalFile& signals) {
  while (!all_ended()) {
    std::vector<pollfd> files = {{signals.fd(), POLLIN, 0}};
    for (const auto& one : launchers_) {
      files.push_back({one.exit_code ? -1 : one.ended.fd(), POLLIN, 0});
    }
    int wait_ms = -1;
    if (end_others_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(
          *end_others_ - Steady::now());
      wait_ms = static_cast<int>(std::max<int64_t>(0, left.count()));
    }
    ::poll(files.data(), files.size(), wait_ms);
    for (int signal = 0; (signal = signals.next()) != 0;) {
      if (signal == SIGTSTP || signal == SIGWINCH) continue;
      pass_on(signal);
      if (signal == SIGUSR1 || signal == SIGUSR2) continue;
      if (!first_signal_) {
        first_signal_ = Steady::now();
      } else if (Steady::now() - *first_signal_ > kSecondSignal) {
        // An ssh whose host does not answer passes nothing on.
        for (const auto& one : launchers_) {
          if (!one.exit_code) ::kill(one.pid, SIGTERM);
        }
      }
    }
    for (size_t i = 0; i < launchers_.size(); ++i) {
      if (files[1 + i].revents != 0) note_end(launchers_[i]);
    }
    if (end_others_ && Steady::now() >= *end_others_) {
      end_others_.reset();
      pass_on(SIGTERM);
    }
  }
  return elastic_ && last_code_ >= 0 ? last_code_ : exit_code_;
}

int start_by_ssh(
    const JobHosts& hosts, const HostArguments& arguments,
    const std::string& command, const std::string& num_ranks) {
  Texts ssh;
  std::istringstream text(arguments.ssh);
  for (std::string word; text >> word;) ssh.push_back(word);
  if (ssh.empty()) throw ConfigError("--ssh \"\": names no program");
  const std::string token =
      authentication::read_token(arguments.token_file).key.to_hex();
  const Texts line = own_command_line();
  launch::SignalFile signals;
  std::vector<RemoteLauncher> launchers;
  for (size_t i = 0; i < hosts.remote.size(); ++i) {
    const RemoteHost& host = hosts.remote[i];
    Texts flags = {"--nnodes",      arguments.num_nodes,
                   "--node-rank",   std::to_string(i),
                   "--master-addr", arguments.master_addr};
    if (!num_ranks.empty()) {
      flags.insert(
          flags.end(),
          {"-n",
           host.num_ranks > 0 ? std::to_string(host.num_ranks) : num_ranks});
    }
    Texts words = ssh;
    words.push_back(host.name);
    words.push_back(remote_script(command_with(
        line, command,
        {"--hosts", "--hostfile", "--ssh", "--token-file", "--nnodes",
         "--master-addr"},
        flags)));
    launchers.push_back(start_remote(host.name, words, token));
  }
  const bool elastic = arguments.num_nodes.find(':') != std::string::npos;
  return RemoteJob(std::move(launchers), elastic).run(signals);
}

}  // namespace

std::vector<std::string> own_command_line() {
  Texts words;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!words.empty() && !error) words[0] = self.string();
  return words;
}

Texts command_with(
    const Texts& line, const std::string& command, const Texts& without,
    const Texts& with) {
  Texts result;
  bool added = false;
  bool program = false;
  for (size_t i = 0; i < line.size(); ++i) {
    const std::string& word = line[i];
    program = program || word == "--";
    const auto is_flag = [&](const std::string& flag) { return word == flag; };
    const auto has_value = [&](const std::string& flag) {
      return word.starts_with(flag + "=");
    };
    if (!program && std::ranges::any_of(without, is_flag)) {
      ++i;
      continue;
    }
    if (!program && std::ranges::any_of(without, has_value)) continue;
    result.push_back(word);
    if (!added && i > 0 && word == command) {
      result.insert(result.end(), with.begin(), with.end());
      added = true;
    }
  }
  return result;
}

int start_on_hosts(
    const JobHosts& hosts, const HostArguments& arguments,
    const std::string& command, const std::string& num_ranks) {
  if (hosts.by == JobHosts::By::srun)
    become_srun(arguments, command, num_ranks);
  return start_by_ssh(hosts, arguments, command, num_ranks);
}

}  // namespace echelon::cli
