// A copy is called CACHE/objects/HASH/NAME, by a hash of the endpoint, the key
// and the etag, so no copy is ever written over: another version of the object
// is another copy.
#include "echelon/storage/local_copy.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>
#include <vector>

#include "echelon/error.h"
#include "echelon/storage/digests.h"
#include "echelon/storage/object_store.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::storage {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kAnnouncedBytes = int64_t{64} << 20;

[[noreturn]] void refuse(const fs::path& path, const char* doing, int error) {
  throw DataError(format(
      "{}: {} failed: {}; ECHELON_CACHE names another folder for copies of "
      "objects",
      path.string(), doing, std::strerror(error)));
}

std::string md5_of_file(const fs::path& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) refuse(path, "opening it", errno);
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> sum(
      EVP_MD_CTX_new(), EVP_MD_CTX_free);
  EVP_DigestInit_ex(sum.get(), EVP_md5(), nullptr);
  std::vector<char> part(size_t{1} << 20);
  for (;;) {
    const ssize_t got = ::read(file.fd(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, "reading it", errno);
    if (got == 0) break;
    EVP_DigestUpdate(sum.get(), part.data(), static_cast<size_t>(got));
  }
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  EVP_DigestFinal_ex(sum.get(), digest.data(), &size);
  return hex_text(std::span(digest).first(size));
}

bool is_copy(const fs::path& path, const ObjectInfo& object) {
  std::error_code error;
  return fs::file_size(path, error) == static_cast<uintmax_t>(object.bytes) &&
         !error;
}

void fetch(ObjectStore& store, const ObjectInfo& object, const fs::path& copy) {
  const fs::path part = copy.string() + ".part";
  if (object.bytes >= kAnnouncedBytes) {
    std::fprintf(
        stderr, "fetching %lld MiB of %s, this once\n",
        static_cast<long long>(object.bytes >> 20),
        store.url(object.key).c_str());
  }
  FileDescriptor file(
      ::open(part.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.is_open()) refuse(part, "making it", errno);
  if (const int error = ::posix_fallocate(file.fd(), 0, object.bytes);
      object.bytes > 0 && error != 0 && error != EOPNOTSUPP &&
      error != EINVAL) {
    ::unlink(part.c_str());
    refuse(part, "reserving its bytes", error);
  }
  store.download(object, file.fd());
  if (object.modified > 0) {
    const std::array<timespec, 2> times = {
        {{object.modified, 0}, {object.modified, 0}}};
    ::futimens(file.fd(), times.data());
  }
  if (::fsync(file.fd()) != 0) refuse(part, "synchronising it", errno);
  file.close();
  if (!object.md5.empty() && md5_of_file(part) != object.md5) {
    ::unlink(part.c_str());
    throw DataError(format(
        "{}: what was fetched does not have the MD5 that the storage names "
        "({}); start again, or put the object there anew",
        store.url(object.key), object.md5));
  }
  if (::rename(part.c_str(), copy.c_str()) != 0) {
    refuse(part, "renaming it", errno);
  }
}

std::optional<ObjectInfo>
find_object(ObjectStore& store, const ObjectUrl& url) {
  try {
    auto found = store.find(url.key);
    // The answer to HEAD does not say whether the bucket is there.
    if (!found) store.list(url.key, 1);
    return found;
  } catch (const StorageError& error) {
    throw DataError(error.what());
  }
}

}  // namespace

std::string local_copy(const std::string& path) {
  if (!is_object_url(path)) return path;
  const ObjectUrl url = parse_object_url(path);
  ObjectStore store(url.bucket, read_settings());
  const auto object = find_object(store, url);
  if (!object) {
    throw DataError(format(
        "{}: there is no such object; aws s3 ls shows what there is", path));
  }
  const fs::path cache = cache_folder();
  if (cache.empty()) {
    throw ConfigError(
        "neither ECHELON_CACHE, XDG_CACHE_HOME nor HOME is set; set "
        "ECHELON_CACHE to a folder where copies of objects may be kept");
  }
  const std::string version = format(
      "{}\n{}\n{}\n{}", store.settings().endpoint, url.text(), object->etag,
      object->bytes);
  const std::string hash = digest_of(EVP_sha256(), bytes_of(version));
  const fs::path folder = cache / "objects" / hash.substr(0, 32);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse(folder, "making it", error.value());
  const fs::path copy = folder / fs::path(url.key).filename();
  const FileDescriptor lock = lock_copies(folder);
  if (is_copy(copy, *object)) return copy.string();
  try {
    fetch(store, *object, copy);
  } catch (const StorageError& failed) {
    throw DataError(failed.what());
  }
  return copy.string();
}

FileDescriptor lock_copies(const fs::path& folder) {
  const fs::path mark = folder / "LOCK";
  FileDescriptor lock(::open(mark.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock.is_open()) refuse(mark, "opening it", errno);
  while (::flock(lock.fd(), LOCK_EX) != 0) {
    if (errno != EINTR) refuse(mark, "locking it", errno);
  }
  return lock;
}

bool exists_there(const std::string& path) {
  if (!is_object_url(path)) {
    std::error_code ignored;
    return fs::exists(path, ignored);
  }
  const ObjectUrl url = parse_object_url(path);
  ObjectStore store(url.bucket, read_settings());
  return find_object(store, url).has_value();
}

}  // namespace echelon::storage
