// A file is verified in blocks of kChecksumBlockBytes: read_block() hashes each
// piece as it is read and compares the block's digest with the manifest's, so
// nothing unverified is returned. The header is read from verified blocks as
// well and must name exactly the manifest's slices. Only to say which tensor
// damage is in, the header is also read without verification.
#include "echelon/checkpoint/files/checked_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using safetensors::quote_printable;
using safetensors::shape_string;

// A piece is hashed while it is still in the processor's cache.
constexpr size_t kReadBytes = 256 << 10;

}  // namespace

CheckedFile::CheckedFile(
    const std::string& folder, const CheckpointManifest& manifest,
    const SavedFile& file, std::vector<Entry> slices, OpenRemote remote)
    : manifest_(manifest),
      file_(file),
      path_(folder + "/" + file.name),
      slices_(std::move(slices)),
      open_remote_(std::move(remote)) {}

CheckedFile::~CheckedFile() {
  close();
}

void CheckedFile::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  remote_.reset();
}

int64_t CheckedFile::num_blocks() const {
  return static_cast<int64_t>(file_.blocks.size());
}

int64_t CheckedFile::block_bytes(int64_t block) const {
  return std::min(
      kChecksumBlockBytes, file_.bytes - block * kChecksumBlockBytes);
}

std::string CheckedFile::first_tensor() const {
  return slices_.empty() ? "" : slices_.front().tensor->name;
}

std::string CheckedFile::contents() const {
  if (slices_.empty()) return "; it holds no tensors";
  return format(
      "; it holds {}{}{}{}", slices_.size(),
      (slices_.size() == 1 ? " part of a tensor, " : " parts of tensors, "),
      quote_printable(first_tensor()),
      (slices_.size() == 1 ? "" : " and others"));
}

Damage CheckedFile::damage(
    std::string_view tensor, int64_t offset, const std::string& what) const {
  return {file_.name, std::string(tensor), offset, path_ + ": " + what};
}

Damage CheckedFile::damage_at(
    int64_t begin, int64_t end, const std::string& what) const {
  if (places_.empty()) {
    return damage(
        first_tensor(), begin,
        format("from byte {} on, it {}{}", begin, what, contents()));
  }
  std::vector<const Place*> here;
  for (const auto& place : places_) {
    if (place.begin < end && place.end > begin) here.push_back(&place);
  }
  if (here.empty()) {
    return damage("", begin, format("its header, at byte {}, {}", begin, what));
  }
  const int64_t offset = std::max(begin, here.front()->begin);
  std::string text = format(
      "tensor {}, at byte {}", quote_printable(*here.front()->tensor), offset);
  if (here.size() > 1) {
    text += format(
        " (and {} more, up to {})", here.size() - 1,
        quote_printable(*here.back()->tensor));
  }
  return damage(*here.front()->tensor, offset, text + ", " + what);
}

std::optional<Damage> CheckedFile::open() {
  close();
  try {
    if (open_remote_) remote_ = open_remote_(file_.name);
  } catch (const CheckpointError& error) {
    return damage(
        first_tensor(), 0,
        std::string("cannot be opened: ") + error.what() + contents());
  }
  if (remote_) {
    bytes_there_ = remote_->size();
  } else {
    fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd_ < 0) {
      const std::string reason =
          errno == ENOENT
              ? std::string("is missing")
              : std::string("cannot be opened: ") + std::strerror(errno);
      return damage(first_tensor(), 0, reason + contents());
    }
    struct stat status = {};
    if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
      close();
      return damage(first_tensor(), 0, "is not a file" + contents());
    }
    bytes_there_ = status.st_size;
  }
  if (bytes_there_ == file_.bytes) return std::nullopt;
  const std::string lengths = format(
      "the file is {} bytes long, the manifest says {}", bytes_there_,
      file_.bytes);
  if (bytes_there_ > file_.bytes) {
    return damage(first_tensor(), file_.bytes, lengths + contents());
  }
  read_unverified_head();
  return damage_at(bytes_there_, file_.bytes, "is cut off: " + lengths);
}

std::string CheckedFile::read_at(int64_t offset, std::byte* to, int64_t bytes) {
  if (remote_) {
    try {
      remote_->read(offset, {to, static_cast<size_t>(bytes)});
    } catch (const CheckpointError& error) {
      return error.what();
    }
    bytes_read_ += bytes;
    return "";
  }
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::strerror(errno);
    if (got == 0) return "the file ends at byte " + std::to_string(offset);
    to += got;
    offset += got;
    bytes -= got;
    bytes_read_ += got;
  }
  return "";
}

std::optional<Damage>
CheckedFile::read_block(int64_t block, const Parts& parts) {
  const int64_t begin = block * kChecksumBlockBytes;
  const int64_t end = begin + block_bytes(block);
  const auto wrong = [&](const std::string& what) {
    if (!tried_head_) read_unverified_head();  // for the names
    return damage_at(begin, end, what);
  };
  ChecksumStream sum;
  int64_t at = begin;
  for (auto part : parts) {
    while (!part.empty()) {
      const auto piece = part.first(std::min(part.size(), kReadBytes));
      const auto bytes = static_cast<int64_t>(piece.size());
      const std::string error = read_at(at, piece.data(), bytes);
      if (!error.empty()) return wrong("cannot be read: " + error);
      sum.update(piece.data(), piece.size());
      at += bytes;
      part = part.subspan(piece.size());
    }
  }
  const std::string found = sum.digest();
  const std::string& expected = file_.blocks[static_cast<size_t>(block)];
  if (found == expected) return std::nullopt;
  return wrong(format(
      "is damaged: bytes {} to {} of the file have the checksum {}, the "
      "manifest says {}{}",
      begin, end, found, expected, looks_like(found, parts)));
}

/// Says what a damaged block holds instead, where that is known.
std::string
CheckedFile::looks_like(const std::string& sum, const Parts& parts) const {
  const auto zero = [](std::span<const std::byte> part) {
    return std::all_of(part.begin(), part.end(), [](std::byte b) {
      return b == std::byte{0};
    });
  };
  if (std::all_of(parts.begin(), parts.end(), zero)) {
    return "; they are all zero";
  }
  for (const auto& other : manifest_.files) {
    for (size_t i = 0; i < other.blocks.size(); ++i) {
      if (other.blocks[i] != sum) continue;
      return format("; they are block {} of {}", i, other.name);
    }
  }
  return "";
}

std::optional<Damage> CheckedFile::read_head(const GetBlock& block) {
  tried_head_ = true;
  const auto bytes = static_cast<uint64_t>(file_.bytes);
  std::vector<std::byte> head;
  std::string wrong;
  if (file_.blocks.empty()) return damage("", 0, "is empty" + contents());
  const auto first = block(0);
  try {
    head.resize(safetensors::head_bytes(first, bytes, path_));
  } catch (const CheckpointError& error) {
    return Damage{file_.name, "", 0, error.what()};
  }
  for (size_t done = 0; done < head.size();) {
    const auto part = block(static_cast<int64_t>(done) / kChecksumBlockBytes);
    const size_t size = std::min(part.size(), head.size() - done);
    std::memcpy(head.data() + done, part.data(), size);
    done += size;
  }
  try {
    wrong = compare(safetensors::parse_head(head, bytes, path_));
  } catch (const CheckpointError& error) {
    return Damage{file_.name, "", 0, error.what()};
  }
  if (!wrong.empty()) return damage("", 0, wrong);
  has_head_ = true;
  return std::nullopt;
}

std::optional<Damage> CheckedFile::read_unverified_head() {
  std::vector<std::byte> buffer;
  std::string error;
  try {
    return read_head([&](int64_t block) -> std::span<const std::byte> {
      buffer.resize(static_cast<size_t>(block_bytes(block)));
      error = read_at(
          block * kChecksumBlockBytes, buffer.data(), block_bytes(block));
      if (!error.empty()) throw CheckpointError(error);
      return buffer;
    });
  } catch (const CheckpointError&) {
    return damage("", 0, "its header cannot be read: " + error);
  }
}

/// Returns how the header differs from the manifest's slices; if it does not,
/// remembers where they are.
std::string CheckedFile::compare(const safetensors::Header& header) {
  std::unordered_map<std::string, const safetensors::TensorInfo*> there;
  for (const auto& info : header.tensors) there[info.name] = &info;
  std::unordered_map<std::string, int64_t> begins;
  std::vector<Place> places;
  for (const auto& [tensor, slice] : slices_) {
    const std::string name = "tensor " + quote_printable(tensor->name) + ": ";
    const auto found = there.find(slice->key);
    if (found == there.end()) {
      return name + "its header has no key " + quote_printable(slice->key) +
             ", which the manifest names";
    }
    const auto& info = *found->second;
    if (info.dtype != tensor->dtype || info.shape != slice->box.sizes) {
      return format(
          "{}its header says {} {} for key {}, the manifest {} {}", name,
          info.dtype, shape_string(info.shape), quote_printable(slice->key),
          tensor->dtype, shape_string(slice->box.sizes));
    }
    const auto begin = static_cast<int64_t>(header.data_begin + info.begin);
    if (static_cast<uint64_t>(begin) % safetensors::dtype_bytes(info.dtype) !=
        0) {
      return format(
          "{}begins at byte {}, which is no multiple of the bytes of {}", name,
          begin, info.dtype);
    }
    if (!begins.emplace(slice->key, begin).second) {
      return name + "the manifest names key " + quote_printable(slice->key) +
             " twice";
    }
    places.push_back(
        {&tensor->name, begin,
         begin + static_cast<int64_t>(info.end - info.begin)});
  }
  if (begins.size() != there.size()) {
    for (const auto& info : header.tensors) {
      if (!begins.contains(info.name)) {
        return "its header has the key " + quote_printable(info.name) +
               ", which the manifest does not name";
      }
    }
  }
  std::ranges::stable_sort(places, {}, &Place::begin);
  begins_ = std::move(begins);
  places_ = std::move(places);
  return "";
}

std::vector<std::unique_ptr<CheckedFile>> checked_files(
    const std::string& folder, const CheckpointManifest& manifest,
    const OpenRemote& remote) {
  std::vector<std::vector<CheckedFile::Entry>> slices(manifest.files.size());
  for (const auto& tensor : manifest.tensors) {
    for (const auto& slice : tensor.slices) {
      slices[static_cast<size_t>(slice.file)].push_back({&tensor, &slice});
    }
  }
  std::vector<std::unique_ptr<CheckedFile>> files;
  for (size_t i = 0; i < slices.size(); ++i) {
    files.push_back(std::make_unique<CheckedFile>(
        folder, manifest, manifest.files[i], std::move(slices[i]), remote));
  }
  return files;
}

std::string folder_of_files(const std::string& path) {
  struct stat status = {};
  const bool is_file =
      ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
  if (!is_file) return path;
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

CheckpointManifest read_manifest(const std::string& at) {
  const std::string path =
      folder_of_files(at) == at ? at + "/manifest.json" : at;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    throw CheckpointError(
        at + " is no checkpoint: its manifest.json cannot be opened: " +
        std::strerror(errno));
  }
  std::string text;
  std::vector<char> buffer(1 << 20);
  ssize_t got = 0;
  do {
    got = ::read(fd, buffer.data(), buffer.size());
    if (got > 0) text.append(buffer.data(), static_cast<size_t>(got));
  } while (got > 0 || (got < 0 && errno == EINTR));
  const int error = errno;
  ::close(fd);
  if (got < 0) {
    throw CheckpointError(path + " cannot be read: " + std::strerror(error));
  }
  return parse_manifest(text, path);
}

}  // namespace echelon
