// One file of a checkpoint: returns blocks that match the manifest, or a
// sentence that says what is wrong. Private to this folder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/checkpoint/format/manifest.h"
#include "echelon/checkpoint/format/safetensors.h"

namespace echelon {

class CheckedFile {
 public:
  /// A slice that should be in the file.
  struct Entry {
    const SavedTensor* tensor;
    const SavedSlice* slice;
  };

  /// Borrows the manifest. Opens nothing.
  CheckedFile(
      const std::string& folder, const CheckpointManifest& manifest,
      const SavedFile& file, std::vector<Entry> slices, OpenRemote remote);
  CheckedFile(const CheckedFile&) = delete;
  CheckedFile& operator=(const CheckedFile&) = delete;
  ~CheckedFile();

  int64_t num_blocks() const;
  int64_t block_bytes(int64_t block) const;
  int64_t bytes_read() const { return bytes_read_; }
  /// The length that it has. After open().
  int64_t bytes_there() const { return bytes_there_; }
  bool is_open() const { return fd_ >= 0 || remote_ != nullptr; }
  bool has_head() const { return has_head_; }

  /// Opens the file and returns what is wrong with it: missing, unreadable, or
  /// of another length (which leaves it open).
  std::optional<Damage> open();
  void close();

  /// Reads a block into the memory of `parts` and verifies it. Several threads
  /// may do so at once after a header was read.
  using Parts = std::vector<std::span<std::byte>>;
  std::optional<Damage> read_block(int64_t block, const Parts& parts);

  /// Parses the header and compares it with the manifest. `block` returns the
  /// bytes of a block; what it throws passes through.
  using GetBlock = std::function<std::span<const std::byte>(int64_t block)>;
  std::optional<Damage> read_head(const GetBlock& block);
  /// The same from bytes that are not verified: to name tensors, or when all
  /// blocks are verified anyway.
  std::optional<Damage> read_unverified_head();

  /// Where the slice of that key begins in the file. After read_head().
  int64_t begin_of(const std::string& key) const { return begins_.at(key); }

 private:
  struct Place {
    const std::string* tensor;
    int64_t begin = 0;
    int64_t end = 0;
  };

  Damage damage(
      std::string_view tensor, int64_t offset, const std::string& what) const;
  /// Damage of bytes [begin, end), which names the tensors there.
  Damage damage_at(int64_t begin, int64_t end, const std::string& what) const;
  /// "; it holds 12 parts of tensors, …"
  std::string contents() const;
  std::string first_tensor() const;
  std::string looks_like(const std::string& sum, const Parts& parts) const;
  /// Returns what went wrong; empty when nothing did.
  std::string read_at(int64_t offset, std::byte* to, int64_t bytes);
  std::string compare(const safetensors::Header& header);

  const CheckpointManifest& manifest_;
  const SavedFile& file_;
  const std::string path_;
  const std::vector<Entry> slices_;
  const OpenRemote open_remote_;
  int fd_ = -1;
  std::unique_ptr<RemoteFile> remote_;  // in place of fd_
  int64_t bytes_there_ = 0;
  std::atomic<int64_t> bytes_read_ = 0;
  bool has_head_ = false;
  bool tried_head_ = false;
  std::unordered_map<std::string, int64_t> begins_;  // by key
  std::vector<Place> places_;                        // by begin
};

/// The files of a checkpoint, in the manifest's order. Borrows the manifest.
std::vector<std::unique_ptr<CheckedFile>> checked_files(
    const std::string& folder, const CheckpointManifest& manifest,
    const OpenRemote& remote = {});

/// The manifest of the checkpoint at `path`, which is a folder with a
/// manifest.json, or another manifest in the folder of its files. Throws
/// CheckpointError.
CheckpointManifest read_manifest(const std::string& path);
/// The folder of that checkpoint's files.
std::string folder_of_files(const std::string& path);

}  // namespace echelon
