#include "echelon/checkpoint/files/folder_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::folder_files {
namespace {

class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags)
      : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail(path, "opening it", errno);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  void close() {
    if (::close(std::exchange(fd_, -1)) != 0) fail(path_, "closing it", errno);
  }

 private:
  const fs::path& path_;
  int fd_;
};

// Some file systems cannot sync folders, and return EINVAL.
void sync(const fs::path& path, int flags) {
  Descriptor file(path, O_RDONLY | flags);
  while (::fsync(file.get()) != 0) {
    if (errno == EINVAL && flags != 0) return;
    if (errno != EINTR) fail(path, "synchronising it", errno);
  }
}

}  // namespace

std::string step_name(int64_t step) {
  return format("step-{:08}", step);
}

std::optional<int64_t> step_of(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return {};
  const auto digits = name.substr(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || step < 0 || step_name(step) != name) return {};
  return step;
}

fs::path removed_path(const fs::path& folder, int64_t step) {
  return folder / ("." + step_name(step) + ".removed");
}

bool is_debris(std::string_view name) {
  return name.starts_with(".step-") || name == kNextLatest;
}

bool has_name_of_run(std::string_view name) {
  constexpr std::string_view kLast = "last.safetensors";
  return name == kLatest || name == kLock || name == kLast ||
         name.starts_with(std::string(kLast) + ".part-") || is_debris(name) ||
         name.starts_with(kAside) || name.starts_with(kSeenByAll) ||
         step_of(name).has_value();
}

bool is_checkpoint(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path / kManifest, ignored);
}

std::optional<int64_t> named_step(const fs::path& file) {
  char text[64];
  // O_NONBLOCK: a pipe would wait for a writer.
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return {};
  const ssize_t bytes = ::read(fd, text, sizeof(text));
  ::close(fd);
  if (bytes <= 0 || text[bytes - 1] != '\n') return {};
  return step_of({text, static_cast<size_t>(bytes - 1)});
}

void fail(
    const fs::path& path, const std::string& doing, int error,
    int64_t needed_bytes) {
  std::string text =
      format("{}: {} failed: {}", path.string(), doing, std::strerror(error));
  if (needed_bytes >= 0) text += format("; it needs {} bytes", needed_bytes);
  auto place = path;
  std::error_code ignored;
  while (!fs::exists(place, ignored) && place.has_parent_path() &&
         place != place.parent_path()) {
    place = place.parent_path();
  }
  if (const int64_t free = free_bytes(place); free >= 0) {
    text += format("; {} bytes are free there", free);
  }
  throw CheckpointError(text);
}

int64_t free_bytes(const fs::path& path) {
  struct statvfs disk = {};
  const bool known = ::statvfs(path.c_str(), &disk) == 0 && disk.f_blocks > 0;
  return known ? static_cast<int64_t>(disk.f_bavail * disk.f_frsize) : -1;
}

void make_folder(const fs::path& path) {
  std::error_code ignored;
  if (path.empty() || fs::is_directory(path, ignored)) return;
  const auto parent = path.parent_path();
  make_folder(parent);
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) {
    fail(path, "making the folder", errno);
  }
  sync_folder(parent);
}

void sync_file(const fs::path& path) {
  sync(path, 0);
}

void sync_folder(const fs::path& path) {
  sync(path.empty() ? fs::path(".") : path, O_DIRECTORY);
}

void write_file(const fs::path& path, std::string_view text) {
  Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC);
  const auto needed = static_cast<int64_t>(text.size());
  while (!text.empty()) {
    const ssize_t bytes = ::write(file.get(), text.data(), text.size());
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) {
      fail(path, "writing it", bytes == 0 ? ENOSPC : errno, needed);
    }
    text.remove_prefix(static_cast<size_t>(bytes));
  }
  while (::fsync(file.get()) != 0) {
    if (errno != EINTR) fail(path, "synchronising it", errno, needed);
  }
  file.close();
}

std::string read_file(const fs::path& path) {
  Descriptor file(path, O_RDONLY);
  std::string text;
  char part[1 << 16];
  while (true) {
    const ssize_t bytes = ::read(file.get(), part, sizeof(part));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail(path, "reading it", errno);
    if (bytes == 0) return text;
    text.append(part, static_cast<size_t>(bytes));
  }
}

void rename_path(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(from, "renaming it to " + to.filename().string(), errno);
  }
}

void remove_path(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) fail(path, "removing it", error.value());
}

}  // namespace echelon::folder_files
