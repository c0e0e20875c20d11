#include "echelon/cli/new_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "echelon/checkpoint/format/new_file.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void
fail(const fs::path& path, const std::string& doing, const std::string& why) {
  throw CheckpointError(format(
      "{}: {} failed: {}; nothing was left behind", path.string(), doing, why));
}

void synchronise(const fs::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int synced = file < 0 ? -1 : ::fsync(file);
  const int error = errno;
  if (file >= 0) ::close(file);
  // Some file systems have no fsync of folders.
  if (synced != 0 && error != EINVAL) {
    fail(path, "syncing it", std::strerror(error));
  }
}

// "a/b/" -> "a/b"
fs::path without_slash(const fs::path& path) {
  const auto whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

}  // namespace

void check_parent(const fs::path& out) {
  std::error_code error;
  const auto parent = without_slash(out).parent_path();
  if (fs::is_directory(parent, error)) return;
  throw ConfigError(format(
      "{}: there is no folder {}; make it first", out.string(),
      parent.string()));
}

NewFolder::NewFolder(const fs::path& out) : out_(without_slash(out)) {
  std::error_code error;
  const bool empty = fs::is_directory(out_, error) && fs::is_empty(out_, error);
  if (fs::exists(fs::symlink_status(out_, error)) && !empty) {
    throw ConfigError(out.string() + ": exists already; name a new folder");
  }
  check_parent(out);
  const auto parts =
      out_.parent_path() / ("." + out_.filename().string() + ".part-");
  remove_leftovers(parts);
  const fs::path part = parts.string() + std::to_string(::getpid());
  fs::remove_all(part, error);  // left by a process that had the same number
  if (!fs::create_directory(part, error) || error) {
    fail(out, "making the folder", error.message());
  }
  part_ = part;
  claim_ = ::open(part_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (claim_ >= 0) claim_part(claim_);
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!part_.empty()) fs::remove_all(part_, ignored);
  if (claim_ >= 0) ::close(claim_);
}

void NewFolder::write(const std::string& name, const std::string& text) const {
  std::ofstream file(part_ / name, std::ios::binary);
  file << text;
  file.close();
  if (!file) fail(out_ / name, "writing it", std::strerror(errno));
}

void NewFolder::move_into_place() {
  for (const auto& entry : fs::recursive_directory_iterator(part_)) {
    synchronise(entry.path());
  }
  synchronise(part_);
  std::error_code error;
  fs::rename(part_, out_, error);
  if (error) fail(out_, "renaming it", error.message());
  part_.clear();
  synchronise(out_.parent_path());
}

}  // namespace echelon::cli
