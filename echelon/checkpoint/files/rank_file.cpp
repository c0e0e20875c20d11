// The bytes of a slice pass once through the processor's cache: HashedFile
// hashes a piece and copies it into a buffer of WriteBehind, whose thread
// writes the other buffer meanwhile. Tensors are hashed too, in the time that
// the disk takes. The steps are: the file (header first), sync; the part, sync;
// then both are kept. A failure before the end removes both.
#include "echelon/checkpoint/files/rank_file.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/new_file.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using safetensors::quote_printable;
using safetensors::shape_string;
using safetensors::TensorBytes;

// A piece is small enough to be copied from the processor's cache after it was
// hashed.
constexpr size_t kPieceBytes = 256 << 10;

/// The distinct tensors of the slices, and the key of each slice.
struct Keyed {
  std::vector<SavedTensor> tensors;
  std::vector<size_t> tensor_of;  // of each slice: index into tensors
  std::vector<TensorBytes> keys;  // of each slice
};

Keyed keyed(const std::string& path, const std::vector<SliceBytes>& slices) {
  Keyed out;
  std::map<std::string, size_t> index;
  for (const auto& slice : slices) {
    const auto fail = [&](const std::string& what) {
      throw ConfigError(
          format("{}: tensor {}: {}", path, quote_printable(slice.name), what));
    };
    if (!is_inside(slice.box, slice.shape)) {
      fail(format(
          "the box at {} of {} is not inside of its shape {}",
          shape_string(slice.box.offset), shape_string(slice.box.sizes),
          shape_string(slice.shape)));
    }
    const auto [at, added] = index.emplace(slice.name, out.tensors.size());
    if (added) {
      out.tensors.push_back(
          {.name = slice.name,
           .kind = slice.kind,
           .dtype = slice.dtype,
           .shape = slice.shape});
    }
    const SavedTensor& tensor = out.tensors[at->second];
    if (tensor.kind != slice.kind || tensor.dtype != slice.dtype ||
        tensor.shape != slice.shape) {
      fail(format(
          "one slice is of {} {} ({}), another of {} {} ({}); all slices of a "
          "tensor must say the same",
          tensor.dtype, shape_string(tensor.shape), to_string(tensor.kind),
          slice.dtype, shape_string(slice.shape), to_string(slice.kind)));
    }
    out.tensor_of.push_back(at->second);
  }
  // A tensor may have the name that would be the key of another's slice.
  std::set<std::string> taken;
  for (const auto& tensor : out.tensors) taken.insert(tensor.name);
  std::vector<int64_t> next(out.tensors.size(), 0);
  for (size_t i = 0; i < slices.size(); ++i) {
    int64_t& number = next[out.tensor_of[i]];
    std::string key = slices[i].name;
    if (number == 0) {
      number = 1;
    } else {
      do {
        key = format("{}#{}", slices[i].name, number++);
      } while (!taken.insert(key).second);
    }
    out.tensors[out.tensor_of[i]].slices.push_back({slices[i].box, 0, key});
    out.keys.push_back(
        {key, slices[i].dtype, slices[i].box.sizes, slices[i].bytes});
  }
  return out;
}

/// Writes a file by a thread of its own: while one buffer is written, bypassing
/// the page cache, the next one is filled. Takes two buffers of kBufferBytes,
/// or one of the file's size if that is less, and then no thread.
///
/// One thread calls it. Errors of the disk are CheckpointErrors of a later
/// append() or of finish(); nothing may be called after one.
class WriteBehind {
 public:
  static constexpr size_t kBufferBytes = 1 << 20;

  /// Borrows the file, into which `bytes` in all will go.
  WriteBehind(NewFile& file, uint64_t bytes);
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;
  ~WriteBehind();

  void append(std::span<const std::byte> data);
  /// On return everything is written; the caller calls NewFile::finish().
  void finish();

 private:
  static constexpr std::align_val_t kAlign{NewFile::kDirectBytes};
  struct Free {
    void operator()(std::byte* at) const { ::operator delete[](at, kAlign); }
  };
  using Memory = std::unique_ptr<std::byte[], Free>;

  void hand_over();
  void write_all();
  void write(std::span<const std::byte> buffer);

  NewFile& file_;
  const size_t buffer_bytes_;
  std::array<Memory, 2> memory_;
  size_t filling_ = 0;  // which of them
  size_t filled_ = 0;   // bytes of it

  std::mutex mutex_;
  std::condition_variable changed_;
  std::span<const std::byte> full_;  // being written; empty: none
  bool ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // from the first full buffer on
};

WriteBehind::WriteBehind(NewFile& file, uint64_t bytes)
    : file_(file),
      buffer_bytes_(
          static_cast<size_t>(std::min<uint64_t>(bytes, kBufferBytes))) {}

WriteBehind::~WriteBehind() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WriteBehind::append(std::span<const std::byte> data) {
  while (!data.empty()) {
    if (filled_ == buffer_bytes_) hand_over();
    Memory& own = memory_[filling_];
    if (!own) own.reset(new (kAlign) std::byte[buffer_bytes_]);
    const auto piece =
        data.first(std::min(data.size(), buffer_bytes_ - filled_));
    std::memcpy(own.get() + filled_, piece.data(), piece.size());
    filled_ += piece.size();
    data = data.subspan(piece.size());
  }
}

/// Gives the full buffer to the thread, once the previous one is written.
void WriteBehind::hand_over() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return full_.empty(); });
  if (error_) std::rethrow_exception(error_);
  full_ = {memory_[filling_].get(), filled_};
  if (!thread_.joinable()) thread_ = std::thread([this] { write_all(); });
  changed_.notify_all();
  filling_ = 1 - filling_;
  filled_ = 0;
}

void WriteBehind::finish() {
  if (!thread_.joinable()) {
    if (filled_ > 0) file_.append(memory_[filling_].get(), filled_);
    return;
  }
  if (filled_ > 0) hand_over();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return full_.empty(); });
  if (error_) std::rethrow_exception(error_);
}

// The thread: writes each full buffer with the mutex released. `full_` is not
// empty from hand_over() until its bytes are written, so neither side touches a
// buffer that the other one uses. It ends at the first error.
void WriteBehind::write_all() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !full_.empty() || ended_; });
    if (full_.empty()) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      write(full_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    full_ = {};
    changed_.notify_all();
    if (error) return;
  }
}

void WriteBehind::write(std::span<const std::byte> buffer) {
  if (buffer.size() % NewFile::kDirectBytes == 0) {
    file_.append_direct(buffer.data(), buffer.size());
  } else {
    file_.append(buffer.data(), buffer.size());
  }
  file_.start_writing();
}

/// Appends to a file and takes the checksums of its blocks.
class HashedFile {
 public:
  HashedFile(const std::string& path, uint64_t bytes, NewFile::Under under)
      : file(path, bytes, under), behind_(file, bytes) {}

  NewFile file;
  std::vector<std::string> blocks;
  int64_t bytes = 0;

  void append(std::span<const std::byte> data) {
    while (!data.empty()) {
      const auto piece =
          data.first(std::min({data.size(), kBlock - in_block_, kPieceBytes}));
      sum_.update(piece.data(), piece.size());
      behind_.append(piece);
      in_block_ += piece.size();
      if (in_block_ == kBlock) end_block();
      data = data.subspan(piece.size());
    }
  }
  void finish() {
    if (in_block_ > 0) end_block();
    behind_.finish();
    file.finish();
  }

 private:
  static constexpr auto kBlock = static_cast<size_t>(kChecksumBlockBytes);

  void end_block() {
    bytes += static_cast<int64_t>(in_block_);
    in_block_ = 0;
    blocks.push_back(sum_.digest());
  }

  ChecksumStream sum_;
  size_t in_block_ = 0;
  WriteBehind behind_;
};

/// A file that is written and synced, but not kept yet.
struct Written {
  std::unique_ptr<HashedFile> file;
  RankPart part;
};

Written write_slices(
    const std::string& path, NewFile::Under under,
    const std::vector<SliceBytes>& slices) {
  Keyed keyed_slices = keyed(path, slices);
  const auto& keys = keyed_slices.keys;
  // "pt" is what other programs call tensors laid out as PyTorch's.
  const auto plan = safetensors::plan_file(path, keys, {{"format", "pt"}});

  Written written;
  written.file = std::make_unique<HashedFile>(path, plan.bytes, under);
  HashedFile& out = *written.file;
  out.append(std::as_bytes(std::span(plan.head)));
  for (const auto* tensor : plan.order) {
    out.append(tensor->bytes);
    // Meanwhile the disk writes.
    const auto i = static_cast<size_t>(tensor - keys.data());
    SavedTensor& saved = keyed_slices.tensors[keyed_slices.tensor_of[i]];
    saved.hash =
        saved.hash + hash_elements(
                         saved.shape, slices[i].box, tensor->bytes.data(),
                         safetensors::dtype_bytes(saved.dtype));
  }
  out.finish();
  written.part.tensors = std::move(keyed_slices.tensors);
  written.part.file = {
      std::filesystem::path(path).filename().string(), out.bytes,
      std::move(out.blocks)};
  return written;
}

}  // namespace

RankPart write_rank_file(
    const std::string& folder, const std::string& name,
    const std::vector<SliceBytes>& slices) {
  const std::string path = folder + "/" + name;
  Written written = write_slices(path, NewFile::Under::at_path, slices);
  const std::string text = to_json(written.part);
  NewFile json(
      std::filesystem::path(path).replace_extension(".part.json").string(),
      text.size(), NewFile::Under::at_path);
  json.append(text.data(), text.size());
  json.finish();
  json.keep();
  written.file->file.keep();
  return std::move(written.part);
}

RankPart write_rank_file_over(
    const std::string& path, const std::vector<SliceBytes>& slices) {
  return write_slices(path, NewFile::Under::over, slices).part;
}

std::string rank_file_name(int64_t rank) {
  return format("rank-{:05}.safetensors", rank);
}

}  // namespace echelon
