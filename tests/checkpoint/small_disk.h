// A process of its own for a test's calls, and a file system for it.
#pragma once

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>

namespace echelon {

/// Runs `body` in a child; returns what it returns, or 128 + signal.
inline int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Gives the calling process, alone, a new file system in a folder. False
/// without root's rights.
inline bool mount_disk(
    const std::string& folder, const char* options, unsigned long flags = 0) {
  return ::unshare(CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", folder.c_str(), "tmpfs", flags, options) == 0;
}

}  // namespace echelon
