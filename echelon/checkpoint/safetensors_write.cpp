#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/checkpoint/safetensors.h"
#include "echelon/checkpoint/safetensors_text.h"
#include "echelon/error.h"

namespace echelon::safetensors {
namespace {

constexpr uint64_t kAlignment = 64;  // of the data section

void check(const std::string& path, const std::vector<TensorBytes>& tensors) {
  std::set<std::string> names = {"__metadata__"};
  for (const auto& tensor : tensors) {
    const std::string place =
        path + ": tensor " + in_quotes(tensor.name) + ": ";
    if (!names.insert(tensor.name).second) {
      throw ConfigError(place + "the name is taken; each needs its own");
    }
    const uint64_t width = dtype_bytes(tensor.dtype);
    if (width == 0) {
      throw ConfigError(
          place + "unknown dtype " + in_quotes(tensor.dtype) + "; known are " +
          known_dtypes());
    }
    const auto bytes = tensor_bytes(tensor.shape, width);
    if (tensor.shape.size() > kMaxDims || !bytes ||
        *bytes != tensor.bytes.size()) {
      throw ConfigError(
          place + "shape " + shape_string(tensor.shape) + " of " +
          tensor.dtype + " does not match its " +
          std::to_string(tensor.bytes.size()) + " bytes");
    }
  }
}

/// Wider dtypes first: what follows is then aligned without gaps.
std::vector<const TensorBytes*>
in_file_order(const std::vector<TensorBytes>& tensors) {
  std::vector<const TensorBytes*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(
      order.begin(), order.end(), [](const auto* a, const auto* b) {
        return dtype_bytes(a->dtype) > dtype_bytes(b->dtype);
      });
  return order;
}

std::string header_text(
    const std::string& path,
    const std::vector<const TensorBytes*>& tensors,
    const Metadata& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  // push_back of pairs: ordered_json would search for each name it is given.
  auto& members = json.get_ref<nlohmann::ordered_json::object_t&>();
  uint64_t begin = 0;
  for (const auto* tensor : tensors) {
    const uint64_t end = begin + tensor->bytes.size();
    nlohmann::ordered_json entry;
    entry["dtype"] = tensor->dtype;
    entry["shape"] = tensor->shape;
    entry["data_offsets"] = {begin, end};
    members.std::vector<std::pair<const std::string, nlohmann::ordered_json>>::
        emplace_back(tensor->name, std::move(entry));
    begin = end;
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception&) {
    throw ConfigError(path + ": a name or a metadata text is not UTF-8");
  }
  text.append((kAlignment - (8 + text.size()) % kAlignment) % kAlignment, ' ');
  if (text.size() > kMaxHeaderBytes) {
    throw ConfigError(
        path + ": its header would take " + std::to_string(text.size()) +
        " bytes; the limit is " + std::to_string(kMaxHeaderBytes));
  }
  return text;
}

/// A file under another name until commit(); removed when that is not reached.
class NewFile {
 public:
  NewFile(const std::string& path, uint64_t bytes)
      : path_(path), bytes_(bytes) {
    folder_ = std::filesystem::path(path).parent_path().string();
    if (folder_.empty()) folder_ = ".";
    for (int attempt = 0; fd_ < 0; ++attempt) {
      part_ = path + ".part-" + std::to_string(::getpid()) + "-" +
              std::to_string(attempt);
      fd_ =
          ::open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ < 0 && (errno != EEXIST || attempt == 1000)) {
        part_.clear();
        fail("creating it", errno);
      }
    }
    // A disk that is too full is found before anything is written. Not every
    // file system can say; then write() will.
    if (::fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0 &&
        errno != EOPNOTSUPP && errno != ENOSYS && errno != EINTR) {
      fail("making room for it", errno);
    }
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() { discard(); }

  void append(const void* data, size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written =
          ::write(fd_, from, std::min<size_t>(bytes, size_t{1} << 30));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail("writing it", written == 0 ? ENOSPC : errno);
      from += written;
      bytes -= static_cast<size_t>(written);
    }
  }

  void commit() {
    if (::fsync(fd_) != 0) fail("syncing it", errno);
    if (::close(std::exchange(fd_, -1)) != 0) fail("closing it", errno);
    if (::rename(part_.c_str(), path_.c_str()) != 0) fail("renaming it", errno);
    part_.clear();
    const int folder =
        ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return;  // a folder may be writable but not readable
    const int synced = ::fsync(folder);
    const int error = errno;
    ::close(folder);
    if (synced != 0 && error != EINVAL) fail("syncing its folder", error);
  }

 private:
  void discard() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    if (!part_.empty()) ::unlink(part_.c_str());
    part_.clear();
  }

  [[noreturn]] void fail(const std::string& doing, int error) {
    discard();
    struct statvfs disk = {};
    std::string free = "unknown";
    if (::statvfs(folder_.c_str(), &disk) == 0) {
      free =
          std::to_string(static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize);
    }
    throw CheckpointError(
        path_ + ": " + doing + " failed: " + std::strerror(error) +
        "; it needs " + std::to_string(bytes_) + " bytes, " + free +
        " are free in " + folder_ + "; nothing was left behind");
  }

  std::string path_;
  std::string folder_;
  std::string part_;
  uint64_t bytes_;
  int fd_ = -1;
};

}  // namespace

void write(
    const std::string& path,
    const std::vector<TensorBytes>& tensors,
    const Metadata& metadata) {
  check(path, tensors);
  const auto order = in_file_order(tensors);
  const std::string header = header_text(path, order, metadata);
  uint64_t total = 8 + header.size();
  for (const auto* tensor : order) total += tensor->bytes.size();

  NewFile file(path, total);
  char length[8];
  for (size_t i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(header.size() >> (8 * i));
  }
  file.append(length, 8);
  file.append(header.data(), header.size());
  for (const auto* tensor : order) {
    file.append(tensor->bytes.data(), tensor->bytes.size());
  }
  file.commit();
}

}  // namespace echelon::safetensors
