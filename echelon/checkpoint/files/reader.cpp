// Each box is taken apart into what it needs of each block of each file. The
// blocks of a file are then read by several threads: directly to the caller's
// memory where all of a block goes there in large pieces, else by way of a
// buffer.
#include "echelon/checkpoint/files/reader.h"

#include <algorithm>
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

namespace echelon {
namespace {

/// Memory for a block; not set to 0 as a vector's would be.
struct Bytes {
  std::unique_ptr<std::byte[]> data =
      std::make_unique_for_overwrite<std::byte[]>(kChecksumBlockBytes);
  size_t size = 0;
};

/// Of row-major memory, in elements.
std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) {
    strides[d - 1] = strides[d] * sizes[d];
  }
  return strides;
}

/// What a read needs of a block of a file.
struct Use {
  const BoxRead* read = nullptr;
  const std::vector<int64_t>* strides = nullptr;
  int64_t element_bytes = 0;
  int64_t begin = 0;  // in the file
  std::vector<Box>
      pieces;  // of the tensor, one behind the other from `begin` on
};

/// What a read needs of a slice.
struct SliceRead {
  const BoxRead* read = nullptr;
  const std::vector<int64_t>* strides = nullptr;
  const SavedSlice* slice = nullptr;
  Box part;
};

/// Element number of `at` in memory of these strides that begins at `from`.
int64_t element_at(
    const std::vector<int64_t>& at, const std::vector<int64_t>& from,
    const std::vector<int64_t>& strides) {
  int64_t element = 0;
  for (size_t d = 0; d < at.size(); ++d) {
    element += (at[d] - from[d]) * strides[d];
  }
  return element;
}

/// Whether row-major elements of these sizes lie one behind the other with
/// these strides.
bool in_one_piece(
    const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t expected = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

bool has_all(const Box& outer, const Box& inner) {
  for (size_t d = 0; d < inner.sizes.size(); ++d) {
    if (inner.offset[d] < outer.offset[d] ||
        inner.offset[d] + inner.sizes[d] > outer.offset[d] + outer.sizes[d]) {
      return false;
    }
  }
  return true;
}

/// Copies elements of `sizes` between two strided places.
void copy_strided(
    std::vector<int64_t> sizes, const std::byte* from,
    const std::vector<int64_t>& from_strides, std::byte* to,
    const std::vector<int64_t>& to_strides, int64_t element_bytes) {
  // The innermost dimensions that lie in one piece on both sides are one copy.
  int64_t run = 1;
  size_t outer = sizes.size();
  while (outer > 0 &&
         (sizes[outer - 1] == 1 ||
          (from_strides[outer - 1] == run && to_strides[outer - 1] == run))) {
    run *= sizes[--outer];
  }
  const auto bytes = static_cast<size_t>(run * element_bytes);
  std::vector<int64_t> index(outer, 0);
  int64_t a = 0, b = 0;
  while (true) {
    std::memcpy(to + b * element_bytes, from + a * element_bytes, bytes);
    size_t d = outer;
    while (d > 0) {
      --d;
      a += from_strides[d];
      b += to_strides[d];
      if (++index[d] < sizes[d]) break;
      a -= index[d] * from_strides[d];
      b -= index[d] * to_strides[d];
      index[d] = 0;
      if (d == 0) return;
    }
    if (outer == 0) return;
  }
}

/// Copies from the pieces' bytes, which begin at `from`, what the read wants.
void copy_pieces(const Use& use, const std::byte* from) {
  for (const Box& piece : use.pieces) {
    if (const auto part = overlap(piece, use.read->box)) {
      const auto from_strides = strides_of(piece.sizes);
      const int64_t a = element_at(part->offset, piece.offset, from_strides);
      const int64_t b =
          element_at(part->offset, use.read->box.offset, *use.strides);
      copy_strided(
          part->sizes, from + a * use.element_bytes, from_strides,
          use.read->to + b * use.element_bytes, *use.strides,
          use.element_bytes);
    }
    from += piece.numel() * use.element_bytes;
  }
}

/// Where the bytes of the pieces go to, when all are wanted and lie one behind
/// the other there as well.
std::span<std::byte> direct_place(const Use& use) {
  std::optional<int64_t> first;
  int64_t next = 0;
  for (const Box& piece : use.pieces) {
    if (!has_all(use.read->box, piece) ||
        !in_one_piece(piece.sizes, *use.strides)) {
      return {};
    }
    const int64_t at =
        element_at(piece.offset, use.read->box.offset, *use.strides);
    if (!first) first = next = at;
    if (at != next) return {};
    next += piece.numel();
  }
  return {
      use.read->to + *first * use.element_bytes,
      static_cast<size_t>((next - *first) * use.element_bytes)};
}

/// Where bytes [begin, end) of a file go to, when all go somewhere directly and
/// few calls read them; else nothing. Sorts the uses.
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

/// The blocks that hold some of the slice's part, with what is needed of each.
void add_uses(
    const SliceRead& wanted, int64_t slice_begin, int64_t element_bytes,
    std::map<int64_t, std::vector<Use>>& uses) {
  const Box& box = wanted.slice->box;
  const auto strides = strides_of(box.sizes);
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
    Use use{wanted.read, wanted.strides, element_bytes, begin, {}};
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

struct CheckpointReader::State {
  State(const std::string& at, int reading_threads)
      : folder(at),
        manifest(read_manifest(at)),
        threads(num_threads(reading_threads)),
        files(checked_files(at, manifest)) {}

  using Block = std::shared_ptr<Bytes>;
  struct Kept {
    int64_t file = 0;
    int64_t block = 0;
    Block bytes;
  };

  const std::string folder;
  const CheckpointManifest manifest;
  const int threads;
  std::vector<std::unique_ptr<CheckedFile>> files;
  /// Blocks of which only a part was wanted: the next call may want the rest.
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

/// That of the block which was not used for the longest time, or new.
CheckpointReader::State::Block CheckpointReader::State::free_memory() {
  const std::lock_guard lock(mutex);
  if (kept.size() < kKeptBlocks) return std::make_shared<Bytes>();
  Block bytes = std::move(kept.back().bytes);
  kept.pop_back();
  return bytes.use_count() == 1 ? bytes : std::make_shared<Bytes>();
}

/// A verified block by way of a buffer.
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
  // One file at a time is open: there may be more than a process can have.
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

CheckpointReader::CheckpointReader(const std::string& folder, int threads)
    : state_(std::make_unique<State>(folder, threads)) {
  for (const auto& file : state_->files) {
    check(file->open());
    file->close();
  }
}
CheckpointReader::~CheckpointReader() = default;

const std::string& CheckpointReader::folder() const {
  return state_->folder;
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
  std::vector<std::vector<int64_t>> strides;
  strides.reserve(boxes.size());
  std::map<int64_t, std::vector<SliceRead>> files;
  for (const auto& box : boxes) {
    const auto& shape = box.tensor->shape;
    if (!is_inside(box.box, shape) ||
        (!box.strides.empty() && box.strides.size() != shape.size())) {
      throw ConfigError(
          "the box at " + safetensors::shape_string(box.box.offset) + " of " +
          safetensors::shape_string(box.box.sizes) +
          " is not inside of tensor " +
          safetensors::in_quotes(box.tensor->name) + " of shape " +
          safetensors::shape_string(shape));
    }
    strides.push_back(
        box.strides.empty() ? strides_of(box.box.sizes) : box.strides);
    for (const auto& slice : box.tensor->slices) {
      if (auto part = overlap(slice.box, box.box)) {
        files[slice.file].push_back(
            {&box, &strides.back(), &slice, std::move(*part)});
      }
    }
  }
  for (const auto& [file, slices] : files) state_->read_file(file, slices);
}

}  // namespace echelon
