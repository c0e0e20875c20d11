#include "tests/support/process.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace echelon::testing_support {
TempFolder::TempFolder() {
  path_ = std::filesystem::temp_directory_path() / "echelon-test-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) {
    throw std::runtime_error("mkdtemp");
  }
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string
TempFolder::script(const std::string& name, const std::string& text) const {
  const std::string path = path_ + "/" + name;
  std::ofstream(path) << text;
  chmod(path.c_str(), 0755);
  return path;
}

Command::Command(
    const std::vector<std::string>& words,
    const std::vector<std::string>& environment)
    : marker_("ECHELON_TEST_MARKER=" + folder_.path()) {
  pid_ = fork();
  if (pid_ != 0) {
    return;
  }
  redirect();
  putenv(marker_.data());
  for (const auto& entry : environment) {
    putenv(const_cast<char*>(entry.c_str()));
  }
  std::vector<char*> arguments;
  for (const auto& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  _exit(126);
}

Command::Command(const std::function<int()>& body) {
  std::fflush(nullptr);
  pid_ = fork();
  if (pid_ != 0) {
    return;
  }
  redirect();
  const int code = body();
  std::fflush(nullptr);
  _exit(code);
}

// In the child: a process group, no core, and files for its output.
void Command::redirect() const {
  setpgid(0, 0);
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  const auto open_as = [](const std::string& name, int fd, int flags) {
    dup2(open(name.c_str(), flags, 0600), fd);
  };
  constexpr int kAppend = O_WRONLY | O_CREAT | O_APPEND;
  open_as("/dev/null", 0, O_RDONLY);
  open_as(folder_.path() + "/out", 1, kAppend);
  open_as(folder_.path() + "/err", 2, kAppend);
}

Command::~Command() {
  if (status_ < 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const pid_t pid : living()) {
    kill(pid, SIGKILL);
  }
}

void Command::signal(int number) const {
  kill(pid_, number);
}

bool Command::until(
    const std::function<bool()>& done, std::chrono::seconds at_most) {
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

int Command::wait(std::chrono::seconds at_most) {
  int status = 0;
  const auto ended = [&] { return waitpid(pid_, &status, WNOHANG) == pid_; };
  if (status_ < 0 && until(ended, at_most)) {
    status_ =
        WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  return status_;
}

bool Command::until_output(const std::string& text, int times) const {
  return until([&] { return count(out(), text) >= times; });
}

std::string Command::out() const {
  return read_file(folder_.path() + "/out");
}
std::string Command::err() const {
  return read_file(folder_.path() + "/err");
}

std::vector<std::string> Command::err_lines() const {
  std::vector<std::string> lines;
  std::istringstream text(err());
  for (std::string line; std::getline(text, line);) {
    lines.push_back(line);
  }
  return lines;
}

std::vector<pid_t> Command::living() const {
  std::vector<pid_t> found;
  if (marker_.empty()) {
    return found;
  }
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) {
      continue;
    }
    // A zombie's environment is empty.
    const std::string environment = read_file(entry.path() / "environ");
    if (environment.find(marker_) != std::string::npos) {
      found.push_back(pid);
    }
  }
  return found;
}

int free_port() {
  std::random_device random;
  for (int tries = 0; tries < 100; ++tries) {
    const int port = 10000 + static_cast<int>(random() % 10000);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const bool bound =
        bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(fd);
    if (bound) return port;
  }
  throw std::runtime_error("no free port");
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos;
       at += part.size()) {
    ++found;
  }
  return found;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace echelon::testing_support
