#include "echelon/comm/nvrtc/kernel_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::nvrtc {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFirstLine = "echelon kernels 1\n";
constexpr size_t kMostBytes = size_t{256} << 20;

std::string hash_of(std::string_view bytes) {
  const auto hash = XXH3_128bits(bytes.data(), bytes.size());
  return format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::string key_of(const KernelRecipe& recipe) {
  std::string all;
  const auto add = [&](std::string_view part) {
    all += std::to_string(part.size());
    all += ':';
    all += part;
  };
  add(recipe.source);
  add(recipe.architecture);
  add(recipe.compiler);
  for (const auto& option : recipe.options) add(option);
  return hash_of(all);
}

std::string header_of(const std::string& key, std::string_view code) {
  return format("{}{}\n{}\n", kFirstLine, key, hash_of(code));
}

// The file's content; nothing when it is not there, is no regular file, or is
// one that another user owns or may write.
std::optional<std::string> read_own_file(const fs::path& path) {
  const FileDescriptor file(
      ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status = {};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0 ||
      !S_ISREG(status.st_mode) || status.st_uid != ::geteuid() ||
      (status.st_mode & (S_IWGRP | S_IWOTH)) != 0 ||
      static_cast<size_t>(status.st_size) > kMostBytes) {
    return std::nullopt;
  }
  std::string text(static_cast<size_t>(status.st_size), '\0');
  for (size_t done = 0; done < text.size();) {
    const ssize_t got =
        ::read(file.fd(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += static_cast<size_t>(got);
  }
  return text;
}

// 0, or errno of what failed. Only the user can read and write the file.
int write_own_file(
    const fs::path& path, const std::string& header, std::string_view code) {
  std::error_code error;
  fs::create_directories(path.parent_path().parent_path(), error);
  if (error) return error.value();
  if (::mkdir(path.parent_path().c_str(), 0700) != 0 && errno != EEXIST) {
    return errno;
  }
  std::string partial = path.string() + ".XXXXXX";
  FileDescriptor file(::mkostemp(partial.data(), O_CLOEXEC));
  if (!file.is_open()) return errno;
  std::string_view first = header;
  int failed = write_all(file.fd(), first);
  if (failed == 0) failed = write_all(file.fd(), code);
  if (::close(file.release()) != 0 && failed == 0) failed = errno;
  if (failed == 0 && ::rename(partial.c_str(), path.c_str()) != 0) {
    failed = errno;
  }
  if (failed != 0) ::unlink(partial.c_str());
  return failed;
}

}  // namespace

KernelCache::KernelCache(fs::path folder, Say say)
    : folder_(std::move(folder)), say_(std::move(say)) {}

bool KernelCache::load(
    const KernelRecipe& recipe, const std::function<std::string()>& compile,
    const std::function<bool(const std::string& code)>& load) {
  if (const auto kept = find(recipe); kept && load(*kept)) return true;
  const auto code = compile();
  if (!load(code)) return false;
  keep(recipe, code);
  return true;
}

fs::path KernelCache::path_of(const KernelRecipe& recipe) const {
  return folder_ / (key_of(recipe) + ".kernels");
}

std::optional<std::string> KernelCache::find(const KernelRecipe& recipe) const {
  if (folder_.empty()) return std::nullopt;
  auto text = read_own_file(path_of(recipe));
  const auto key = key_of(recipe);
  const size_t start = header_of(key, {}).size();
  if (!text || text->size() <= start) return std::nullopt;
  const auto code = std::string_view(*text).substr(start);
  if (!text->starts_with(header_of(key, code))) return std::nullopt;
  text->erase(0, start);
  return text;
}

void KernelCache::keep(const KernelRecipe& recipe, std::string_view code) {
  if (folder_.empty()) return;
  const auto path = path_of(recipe);
  const int failed =
      write_own_file(path, header_of(key_of(recipe), code), code);
  if (failed == 0) return;
  std::call_once(said_, [&] {
    say_(format(
        "compiled GPU kernels are not kept: cannot write in {}: {}; every "
        "start compiles them again, which takes seconds; ECHELON_CACHE names "
        "another folder",
        folder_.string(), std::strerror(failed)));
  });
}

fs::path kernel_cache_folder() {
  const auto cache = cache_folder();
  return cache.empty() ? cache : cache / "kernels";
}

}  // namespace echelon::nvrtc
