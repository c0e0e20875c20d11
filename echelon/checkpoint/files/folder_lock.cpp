#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <chrono>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <string>
#include <thread>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/folder_files.h"
#include "echelon/error.h"

namespace echelon {
namespace {

std::string owner_text() {
  char host[256] = "?";
  ::gethostname(host, sizeof(host) - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char since[32];
  std::strftime(since, sizeof(since), "%Y-%m-%d %H:%M:%S", &utc);
  return "process " + std::to_string(::getpid()) + " on host " + host +
         " since " + since + " UTC\n";
}

std::string read_owner(int file) {
  char text[512];
  const ssize_t bytes = ::pread(file, text, sizeof(text), 0);
  std::string owner(text, static_cast<size_t>(bytes > 0 ? bytes : 0));
  owner = owner.substr(0, owner.find('\n'));
  for (char& c : owner) {
    if (static_cast<unsigned char>(c) < ' ') c = '?';
  }
  return owner.empty() ? "a process that has not said its name yet" : owner;
}

[[noreturn]] void refuse(const std::filesystem::path& path, int error) {
  folder_files::fail(
      path, "locking it, so that two runs do not write into one folder,",
      error);
}

constexpr auto kDying = std::chrono::seconds(2);

}  // namespace

CheckpointLock::CheckpointLock(const std::filesystem::path& folder) {
  folder_files::make_folder(folder);
  const auto path = folder / "LOCK";
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) folder_files::fail(path, "opening it", errno);
  // A process that was killed gives it up a moment later.
  const auto deadline = std::chrono::steady_clock::now() + kDying;
  while (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    if (error == EWOULDBLOCK && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    const std::string owner = read_owner(file_);
    ::close(file_);
    if (error != EWOULDBLOCK) refuse(path, error);
    throw CheckpointError(
        folder.string() + ": " + owner +
        " writes its checkpoints here; wait until it ends, or give this run a "
        "folder of its own ([train] run)");
  }
  const std::string owner = owner_text();
  if (::ftruncate(file_, 0) != 0 ||
      ::pwrite(file_, owner.data(), owner.size(), 0) !=
          static_cast<ssize_t>(owner.size())) {
    const int error = errno;
    ::close(file_);
    folder_files::fail(path, "writing it", error);
  }
}

CheckpointLock::~CheckpointLock() {
  // The file stays: who opened it a moment ago would lock one without a name.
  ::close(file_);
}

}  // namespace echelon
