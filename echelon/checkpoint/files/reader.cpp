// Each box is split into what it needs of each block of each file. Several
// threads then read the blocks of a file: directly into the caller's memory
// where all of a block goes there in large pieces, else through a buffer.
#include "echelon/checkpoint/files/reader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "echelon/checkpoint/files/checked_file.h"
#include "echelon/checkpoint/files/shared_work.h"
#include "echelon/checkpoint/format/safetensors_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// The use of a block of a file by a read.
struct Use {
  const BoxRead* read = nullptr;
  int64_t element_bytes = 0;
  int64_t begin = 0;        // in the file
  std::vector<Box> pieces;  // of the tensor, contiguous from `begin` on
};

/// The part of a slice that a read needs.
struct SliceRead {
  const BoxRead* read = nullptr;
  const SavedSlice* slice = nullptr;
  Box part;
};

bool has_all(const Box& outer, const Box& inner) {
  for (size_t d = 0; d < inner.sizes.size(); ++d) {
    if (inner.offset[d] < outer.offset[d] ||
        inner.offset[d] + inner.sizes[d] > outer.offset[d] + outer.sizes[d]) {
      return false;
    }
  }
  return true;
}

/// Copies what the read wants from the pieces' bytes, which begin at `from`.
void copy_pieces(const Use& use, const std::byte* from) {
  for (const Box& piece : use.pieces) {
    copy_overlap(
        piece, from, use.read->box, use.read->to, use.read->strides,
        static_cast<size_t>(use.element_bytes));
    from += piece.numel() * use.element_bytes;
  }
}

/// Where the bytes of the pieces go, when all are wanted and are contiguous
/// there as well; else nothing.
std::span<std::byte> direct_place(const Use& use) {
  std::optional<int64_t> first;
  int64_t next = 0;
  for (const Box& piece : use.pieces) {
    if (!has_all(use.read->box, piece) ||
        !is_row_major(piece.sizes, use.read->strides)) {
      return {};
    }
    const int64_t at =
        element_at(piece.offset, use.read->box.offset, use.read->strides);
    if (!first) first = next = at;
    if (at != next) return {};
    next += piece.numel();
  }
  return {
      use.read->to + *first * use.element_bytes,
      static_cast<size_t>((next - *first) * use.element_bytes)};
}

/// Where bytes [begin, end) of a file go, when all can be read directly, by few
/// calls; else nothing. Sorts the uses.
CheckedFile::Parts
direct_parts(std::vector<Use>& uses, int64_t begin, int64_t end) {
  constexpr int64_t kLeastBytes = 64 << 10;  // on average: a call's worth
  if (static_cast<int64_t>(uses.size()) * kLeastBytes > end - begin &&
      uses.size() > 1) {
    return {};
  }
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
    return a.begin < b.begin;
  });
  CheckedFile::Parts parts;
  for (const Use& use : uses) {
    const auto part = direct_place(use);
    if (use.begin != begin || part.empty()) return {};
    begin += static_cast<int64_t>(part.size());
    parts.push_back(part);
  }
  return begin == end ? parts : CheckedFile::Parts{};
}

/// Adds the blocks that hold some of the slice's part, with what each is used
/// for.
void add_uses(
    const SliceRead& wanted, int64_t slice_begin, int64_t element_bytes,
    std::map<int64_t, std::vector<Use>>& uses) {
  const Box& box = wanted.slice->box;
  const auto strides = row_major_strides(box.sizes);
  const Box& part = wanted.part;
  std::vector<int64_t> last = part.offset;
  for (size_t d = 0; d < last.size(); ++d) last[d] += part.sizes[d] - 1;
  const int64_t from =
      slice_begin +
      element_at(part.offset, box.offset, strides) * element_bytes;
  const int64_t to =
      slice_begin + (element_at(last, box.offset, strides) + 1) * element_bytes;
  const int64_t slice_end = slice_begin + box.numel() * element_bytes;
  for (int64_t block = from / kChecksumBlockBytes;
       block * kChecksumBlockBytes < to; ++block) {
    const int64_t begin = std::max(slice_begin, block * kChecksumBlockBytes);
    const int64_t end = std::min(slice_end, (block + 1) * kChecksumBlockBytes);
    Use use{wanted.read, element_bytes, begin, {}};
    use.pieces = boxes_of(
        box, {(begin - slice_begin) / element_bytes,
              (end - slice_begin) / element_bytes});
    const bool some = std::any_of(
        use.pieces.begin(), use.pieces.end(),
        [&](const Box& piece) { return overlap(piece, part).has_value(); });
    if (some) uses[block].push_back(std::move(use));
  }
}

}  // namespace

void add_reads(
    std::vector<BoxRead>& reads, const SavedTensor& tensor,
    const IndexRange& range, std::byte* to) {
  const auto width = safetensors::dtype_bytes(tensor.dtype);
  for (auto& box : boxes_of(whole_box(tensor.shape), range)) {
    const auto bytes = static_cast<size_t>(box.numel()) * width;
    reads.push_back({.tensor = &tensor, .box = std::move(box), .to = to});
    to += bytes;
  }
}

struct CheckpointReader::State {
  State(const std::string& at, int reading_threads, const OpenRemote& remote)
      : path(at),
        manifest(read_manifest(at)),
        threads(num_threads(reading_threads)),
        files(checked_files(folder_of_files(at), manifest, remote)) {}

  /// Memory for a block, not initialised as a vector's would be.
  struct Bytes {
    std::unique_ptr<std::byte[]> data =
        std::make_unique_for_overwrite<std::byte[]>(kChecksumBlockBytes);
    size_t size = 0;
  };
  using Block = std::shared_ptr<Bytes>;
  struct Kept {
    int64_t file = 0;
    int64_t block = 0;
    Block bytes;
  };

  const std::string path;
  const CheckpointManifest manifest;
  const int threads;
  std::vector<std::unique_ptr<CheckedFile>> files;
  /// Blocks of which a read wanted a part only: the next may want the rest.
  std::mutex mutex;
  std::list<Kept> kept;  // the last used first

  Block find(int64_t file, int64_t block);
  Block free_memory();
  Block get(int64_t file, int64_t block);
  void open(int64_t file);
  void read_file(int64_t file, const std::vector<SliceRead>& slices);
  void read_block(int64_t file, int64_t block, std::vector<Use>& uses);
};

namespace {

constexpr size_t kKeptBlocks = 8;

struct ClosedAtEnd {
  CheckedFile& file;
  ~ClosedAtEnd() { file.close(); }
};

void check(const std::optional<Damage>& damage) {
  if (damage) throw CheckpointError(damage->what);
}

}  // namespace

CheckpointReader::State::Block
CheckpointReader::State::find(int64_t file, int64_t block) {
  const std::lock_guard lock(mutex);
  for (auto at = kept.begin(); at != kept.end(); ++at) {
    if (at->file == file && at->block == block) {
      kept.splice(kept.begin(), kept, at);
      return at->bytes;
    }
  }
  return nullptr;
}

/// New memory, or that of the least recently used block.
CheckpointReader::State::Block CheckpointReader::State::free_memory() {
  const std::lock_guard lock(mutex);
  if (kept.size() < kKeptBlocks) return std::make_shared<Bytes>();
  Block bytes = std::move(kept.back().bytes);
  kept.pop_back();
  return bytes.use_count() == 1 ? bytes : std::make_shared<Bytes>();
}

/// A verified block in a buffer.
CheckpointReader::State::Block
CheckpointReader::State::get(int64_t file, int64_t block) {
  if (auto bytes = find(file, block)) return bytes;
  CheckedFile& from = *files[static_cast<size_t>(file)];
  Block bytes = free_memory();
  bytes->size = static_cast<size_t>(from.block_bytes(block));
  check(from.read_block(block, {{bytes->data.get(), bytes->size}}));
  const std::lock_guard lock(mutex);
  kept.push_front({file, block, bytes});
  return bytes;
}

void CheckpointReader::State::open(int64_t file) {
  CheckedFile& opened = *files[static_cast<size_t>(file)];
  check(opened.open());
  if (opened.has_head()) return;
  Block held;
  check(opened.read_head([&](int64_t block) -> std::span<const std::byte> {
    held = get(file, block);
    return {held->data.get(), held->size};
  }));
}

void CheckpointReader::State::read_block(
    int64_t file, int64_t block, std::vector<Use>& uses) {
  CheckedFile& from = *files[static_cast<size_t>(file)];
  const int64_t begin = block * kChecksumBlockBytes;
  const auto parts = direct_parts(uses, begin, begin + from.block_bytes(block));
  if (!parts.empty()) return check(from.read_block(block, parts));
  const Block bytes = get(file, block);
  for (const Use& use : uses) {
    copy_pieces(use, bytes->data.get() + (use.begin - begin));
  }
}

void CheckpointReader::State::read_file(
    int64_t file, const std::vector<SliceRead>& slices) {
  CheckedFile& from = *files[static_cast<size_t>(file)];
  // One file is open at a time: there may be more than a process can open.
  const ClosedAtEnd closed{from};
  open(file);
  std::map<int64_t, std::vector<Use>> uses;
  for (const auto& slice : slices) {
    add_uses(
        slice, from.begin_of(slice.slice->key),
        static_cast<int64_t>(
            safetensors::dtype_bytes(slice.read->tensor->dtype)),
        uses);
  }
  std::vector<std::pair<const int64_t, std::vector<Use>>*> blocks;
  for (auto& entry : uses) blocks.push_back(&entry);
  share_work(static_cast<int64_t>(blocks.size()), threads, [&](int64_t i) {
    auto& [block, wanted] = *blocks[static_cast<size_t>(i)];
    read_block(file, block, wanted);
  });
}

CheckpointReader::CheckpointReader(
    const std::string& path, int threads, const OpenRemote& remote)
    : state_(std::make_unique<State>(path, threads, remote)) {
  for (const auto& file : state_->files) {
    check(file->open());
    file->close();
  }
}
CheckpointReader::~CheckpointReader() = default;

const std::string& CheckpointReader::path() const {
  return state_->path;
}
const CheckpointManifest& CheckpointReader::manifest() const {
  return state_->manifest;
}

int64_t CheckpointReader::bytes_read() const {
  int64_t bytes = 0;
  for (const auto& file : state_->files) bytes += file->bytes_read();
  return bytes;
}

void CheckpointReader::read(const std::vector<BoxRead>& boxes) {
  std::vector<BoxRead> reads = boxes;  // with strides
  std::map<int64_t, std::vector<SliceRead>> files;
  for (auto& read : reads) {
    const auto& shape = read.tensor->shape;
    if (!is_inside(read.box, shape) ||
        (!read.strides.empty() && read.strides.size() != shape.size())) {
      throw ConfigError(format(
          "the box at {} of {} is not inside of tensor {} of shape {}",
          safetensors::shape_string(read.box.offset),
          safetensors::shape_string(read.box.sizes),
          safetensors::quote_printable(read.tensor->name),
          safetensors::shape_string(shape)));
    }
    if (read.strides.empty()) read.strides = row_major_strides(read.box.sizes);
    for (const auto& slice : read.tensor->slices) {
      if (auto part = overlap(slice.box, read.box)) {
        files[slice.file].push_back({&read, &slice, std::move(*part)});
      }
    }
  }
  for (const auto& [file, slices] : files) state_->read_file(file, slices);
}

// ----------------------------------------------- verification of all files

namespace {

using Progress = std::function<void(int64_t)>;

/// What is wrong with the blocks that the file, which may be too short, has.
std::map<int64_t, Damage>
check_blocks(CheckedFile& file, int threads, const Progress& progress) {
  int64_t blocks = file.num_blocks();
  while (blocks > 0 &&
         (blocks - 1) * kChecksumBlockBytes + file.block_bytes(blocks - 1) >
             file.bytes_there()) {
    --blocks;
  }
  std::mutex mutex;
  std::map<int64_t, Damage> found;
  std::atomic<int64_t> done = 0;
  share_work(
      blocks, threads,
      [&](int64_t block) {
        thread_local std::vector<std::byte> buffer;
        const auto bytes = static_cast<size_t>(file.block_bytes(block));
        if (buffer.size() < bytes) buffer.resize(bytes);
        if (auto damage =
                file.read_block(block, {std::span(buffer).first(bytes)})) {
          const std::lock_guard lock(mutex);
          found.emplace(block, std::move(*damage));
        }
        done += file.block_bytes(block);
      },
      [&] { progress(done); });
  return found;
}

/// What is wrong with a file's blocks and header.
std::vector<Damage>
check_file(CheckedFile& file, int threads, const Progress& progress) {
  auto outside = file.open();
  if (!file.is_open()) return {*outside};
  const ClosedAtEnd closed{file};
  const auto head = file.read_unverified_head();
  auto found = check_blocks(file, threads, progress);
  const bool all = static_cast<int64_t>(found.size()) == file.num_blocks();
  std::vector<Damage> damages;
  if (outside) damages.push_back(*outside);
  for (auto& [block, damage] : found) damages.push_back(std::move(damage));
  if (damages.empty() && head) damages.push_back(*head);
  if (!outside && all && found.size() > 1) {
    damages.front().what +=
        "; no block of the file is the one that was written: it may be of "
        "another rank or another checkpoint";
  }
  return damages;
}

}  // namespace

std::vector<Damage> verify_checkpoint(
    const std::string& folder, const std::function<void(int64_t)>& progress,
    int threads) {
  return verify_files(read_manifest(folder), folder, {}, progress, threads);
}

std::vector<Damage> verify_files(
    const CheckpointManifest& manifest, const std::string& folder,
    const OpenRemote& remote, const std::function<void(int64_t)>& progress,
    int threads) {
  threads = num_threads(threads);
  std::vector<Damage> damages;
  int64_t before = 0;
  const auto files = checked_files(folder, manifest, remote);
  for (size_t i = 0; i < files.size(); ++i) {
    const auto found = check_file(*files[i], threads, [&](int64_t done) {
      if (progress) progress(before + done);
    });
    damages.insert(damages.end(), found.begin(), found.end());
    before += manifest.files[i].bytes;
    if (progress) progress(before);
  }
  return damages;
}

}  // namespace echelon
