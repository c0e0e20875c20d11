// Every file is a memfd of the launcher, which ranks open by its path in /proc:
// nothing is left behind on any file system, and memory is freed with the last
// process that holds a file. A slot is two of them. One is a rank file as on
// disk. The other is its record: generation, rank, manifest without tensors,
// and part. It is emptied before the rank file changes and written after, so a
// slot with a record is whole; the reader verifies checksums all the same.
//
// A checkpoint's manifest names its files by their numbers in /proc/PID/fd, so
// CheckpointReader needs to know nothing of slots. Files of other hosts have
// names that open_remote_copies() understands.
#include "echelon/checkpoint/memory/memory_slots.h"

#include <array>
#include <map>
#include <random>
#include <utility>

#include "echelon/checkpoint/memory/memory_index.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {

using memory_slots::Index;
using memory_slots::MemoryFile;
using memory_slots::Record;
using memory_slots::SlotPlace;
using memory_slots::write_over;

namespace {

// A name that no other host has.
std::string random_name() {
  std::random_device source;
  return format("{:08x}{:08x}", source(), source());
}

}  // namespace

struct MemorySlots::Files {
  using Slot = std::array<std::unique_ptr<MemoryFile>, 2>;  // file, record
  std::vector<std::array<Slot, 2>> slots;
  std::array<std::unique_ptr<MemoryFile>, 2> manifests;
  std::unique_ptr<MemoryFile> index;
  std::unique_ptr<MemoryFile> copies;
  Index served;  // the server's place alone
};

MemorySlots::MemorySlots(int num_ranks)
    : host_(random_name()), files_(std::make_unique<Files>()) {
  grow(num_ranks);
  for (auto& manifest : files_->manifests) {
    manifest = std::make_unique<MemoryFile>("echelon-manifest");
  }
  files_->index = std::make_unique<MemoryFile>("echelon-index");
  path_ = files_->index->path();
  try {
    write_index();
  } catch (const CheckpointError& error) {
    throw ConfigError(format(
        "[elastic] memory: ranks could not reach it: {}; memory = \"off\" "
        "needs no /proc",
        error.what()));
  }
}

MemorySlots::~MemorySlots() = default;

void MemorySlots::grow(int num_ranks) {
  auto& slots = files_->slots;
  while (slots.size() < static_cast<size_t>(num_ranks)) {
    std::array<Files::Slot, 2> sides;
    for (auto& side : sides) side = memory_slots::make_slot(slots.size());
    slots.push_back(std::move(sides));
  }
}

void MemorySlots::write_index() const {
  Index index = files_->served;
  index.host = host_;
  for (size_t i = 0; i < files_->slots.size(); ++i) {
    for (size_t side = 0; side < 2; ++side) {
      const auto& [file, record] = files_->slots[i][side];
      index.slots.push_back(
          {host_, static_cast<int>(i), static_cast<int>(side), file->path(),
           record->path()});
    }
  }
  index.own = index.slots.size();
  for (const auto& file : files_->manifests) {
    index.manifests.push_back(file->path());
  }
  index.write(path_);
}

// Ranks may have left half an index.
std::optional<int64_t> MemorySlots::collect() {
  write_index();
  return collect_checkpoints_in_memory(path_);
}

std::optional<int64_t> MemorySlots::newest_step() const {
  std::optional<int64_t> newest;
  for (const SlotPlace& slot : Index::read(path_).slots) {
    if (const auto record = Record::read(slot.record)) {
      newest = std::max(newest.value_or(-1), record->manifest.step);
    }
  }
  return newest;
}

std::string MemorySlots::begin_copies() {
  if (!files_->copies) {
    files_->copies = std::make_unique<MemoryFile>("echelon-copies");
  }
  return files_->copies->path();
}

void MemorySlots::serve_at(
    const std::string& address, int port, const std::string& key) {
  files_->served.copies = begin_copies();
  files_->served.address = address;
  files_->served.port = port;
  files_->served.key = key;
  write_index();
}

std::optional<int64_t> collect_checkpoints_in_memory(const std::string& path) {
  Index index = Index::read(path);
  index.checkpoints.clear();
  // By generation, step, and rank.
  std::map<std::pair<int64_t, int64_t>, std::map<int64_t, Record>> saved;
  for (size_t i = 0; i < index.own; ++i) {
    if (auto record = Record::read(index.slots[i].record)) {
      const std::pair place(record->generation, record->manifest.step);
      saved[place].emplace(record->rank, std::move(*record));
    }
  }
  for (auto at = saved.rbegin(); at != saved.rend(); ++at) {
    std::vector<Record> records;
    for (auto& [rank, record] : at->second) records.push_back(record);
    if (memory_slots::are_all(records))
      memory_slots::add_checkpoint(index, records);
  }
  index.write(path);
  if (index.checkpoints.empty()) return std::nullopt;
  return index.checkpoints.front().first;
}

MemorySlot::MemorySlot(
    const std::string& index, int rank, int64_t kept_step, int number)
    : rank_(rank), number_(number < 0 ? rank : number) {
  const Index all = Index::read(index);
  size_t count = 0;
  for (size_t i = 0; i < all.own && count < sides_.size(); ++i) {
    const SlotPlace& slot = all.slots[i];
    if (slot.number == number_) sides_[count++] = {slot.file, slot.record};
  }
  if (count < sides_.size()) {
    throw CheckpointError(format("{}: has no slots of rank {}", index, rank));
  }
  const auto record = Record::read(sides_[0].record);
  next_ = record && record->manifest.step == kept_step ? 1 : 0;
}

WrittenSlot MemorySlot::write(
    const std::vector<SliceBytes>& slices, CheckpointManifest manifest,
    int generation) {
  const Paths& slot = sides_[next_];
  write_over(slot.record, "");
  const RankPart part = write_rank_file_over(slot.file, slices);
  WrittenSlot written{
      .number = number_,
      .side = static_cast<int>(next_),
      .generation = generation,
      .file = slot.file,
      .record = Record::text(generation, rank_, std::move(manifest), part)};
  write_over(slot.record, written.record);
  next_ = 1 - next_;
  return written;
}

std::vector<CheckpointPlace> checkpoints_in_memory(const std::string& index) {
  std::vector<CheckpointPlace> places;
  for (const auto& [step, manifest] : Index::read(index).checkpoints) {
    places.push_back({manifest, step});
  }
  return places;
}

void discard_checkpoints_in_memory(const std::string& index, int64_t step) {
  for (const SlotPlace& slot : Index::read(index).slots) {
    const auto record = Record::read(slot.record);
    if (record && record->manifest.step > step) write_over(slot.record, "");
  }
}

}  // namespace echelon
