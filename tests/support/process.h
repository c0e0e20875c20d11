// A command as a test runs it: started, watched, signalled, and always ended.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace echelon::testing_support {

/// A folder that is removed with what is in it.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  /// Writes an executable file and returns its path.
  std::string script(const std::string& name, const std::string& text) const;

 private:
  std::string path_;
};

/// What takes longer hangs.
constexpr std::chrono::seconds kHang{60};

class Command {
 public:
  /// Starts `words` in a process group of its own. Every process below it has
  /// marker() in its environment, so that those left over can be found.
  explicit Command(
      const std::vector<std::string>& words,
      const std::vector<std::string>& environment = {});
  /// Starts `body` in a copy of this process, which has loaded its libraries
  /// already and has no other threads. The copy ends with what `body` returns;
  /// living() does not find it.
  explicit Command(const std::function<int()>& body);
  /// Kills what is left.
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  /// Waits for the end; 128 + number for a signal; -1 when it takes longer.
  int wait(std::chrono::seconds at_most = kHang);
  /// Waits until `done()` or the time has passed; says which.
  static bool until(
      const std::function<bool()>& done, std::chrono::seconds at_most = kHang);
  /// Waits until stdout contains `text` `times` times.
  bool until_output(const std::string& text, int times = 1) const;

  std::string out() const;  // stdout so far
  std::string err() const;  // stderr so far
  std::vector<std::string> err_lines() const;
  /// Processes that have the marker, and are not zombies.
  std::vector<pid_t> living() const;

 private:
  void redirect() const;

  TempFolder folder_;
  std::string marker_;
  pid_t pid_ = -1;
  int status_ = -1;
};

/// A port that nobody has at the moment, and that no outgoing connection takes
/// (Linux gives those 32768 and above).
int free_port();
int count(const std::string& text, const std::string& part);
std::string read_file(const std::string& path);

}  // namespace echelon::testing_support
