// Every file is a memfd of the launcher, which ranks open by its path in /proc:
// nothing is left behind on any file system, and memory is freed with the last
// process that holds a file. A slot is two of them. One is a rank file as on
// disk. The other is its record: generation, manifest without tensors, and
// part. It is emptied before the rank file changes and written after, so a slot
// with a record is whole; the reader verifies checksums all the same.
//
// A checkpoint's manifest names its files by their numbers in /proc/PID/fd, so
// CheckpointReader needs to know nothing of slots.
#include "echelon/checkpoint/memory/memory_slots.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

// Replaces the text of a file that is there.
void write_over(const std::string& path, std::string_view text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  int error = file < 0 ? errno : write_all(file, text);
  if (file >= 0 && ::close(file) != 0 && error == 0) error = errno;
  if (error != 0) {
    throw CheckpointError(
        format("{}: writing it failed: {}", path, std::strerror(error)));
  }
}

// The index's lines: "slot RANK FILE RECORD", "manifest NUMBER MANIFEST", a
// file for the manifest of a checkpoint, and "checkpoint STEP MANIFEST".
struct Index {
  struct Line {
    int64_t number = 0;  // rank or step
    std::string first;   // files
    std::string second;
  };
  std::vector<Line> slots;
  std::vector<Line> manifests;
  std::vector<Line> checkpoints;
};

Index read_index(const std::string& path) {
  Index index;
  std::istringstream text(read_text_file(path));
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  std::string kind;
  Index::Line line;
  while (text >> kind >> line.number >> line.first) {
    line.first.insert(0, folder);
    if (kind == "checkpoint") {
      index.checkpoints.push_back(line);
    } else if (kind == "manifest") {
      index.manifests.push_back(line);
    } else if (text >> line.second) {
      line.second.insert(0, folder);
      index.slots.push_back(line);
    }
  }
  return index;
}

void write_index(const std::string& path, const Index& index) {
  const auto number = [](const std::string& file) {
    return file.substr(file.rfind('/') + 1);
  };
  std::string text;
  for (const auto& slot : index.slots) {
    text += format(
        "slot {} {} {}\n", slot.number, number(slot.first),
        number(slot.second));
  }
  for (const auto& one : index.manifests) {
    text += format("manifest {} {}\n", one.number, number(one.first));
  }
  for (const auto& one : index.checkpoints) {
    text += format("checkpoint {} {}\n", one.number, number(one.first));
  }
  write_over(path, text);
}

// What a rank says of a slot that it has written.
struct Record {
  int64_t generation = 0;
  CheckpointManifest manifest;  // without tensors and files
  RankPart part;

  static std::string
  text(int64_t generation, CheckpointManifest manifest, const RankPart& part) {
    add_parts(manifest, {});  // sets the hashes
    const std::string head = to_json(manifest);
    return format("{} {}\n", generation, head.size()) + head + to_json(part);
  }

  // Nothing where a rank was killed before the record was complete.
  static std::optional<Record> read(const std::string& path) {
    const std::string text = read_text_file(path);
    Record record;
    std::istringstream numbers(text);
    size_t head = 0;
    if (!(numbers >> record.generation >> head)) return std::nullopt;
    const size_t begin = text.find('\n') + 1;
    if (begin == 0 || head > text.size() - begin) return std::nullopt;
    try {
      record.manifest = parse_manifest(text.substr(begin, head), path);
      record.part = parse_rank_part(text.substr(begin + head), path);
    } catch (const CheckpointError&) {
      return std::nullopt;
    }
    return record;
  }
};

}  // namespace

class MemorySlots::File {
 public:
  explicit File(const std::string& name)
      : fd_(::memfd_create(name.c_str(), MFD_CLOEXEC)) {
    if (fd_ < 0) {
      throw ConfigError(format(
          "[elastic] memory: no file in memory for {}: {}; `ulimit -n` sets "
          "how many there may be (four a rank), and memory = \"off\" needs "
          "none",
          name, std::strerror(errno)));
    }
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// Its name in the folder of this process's files.
  std::string number() const { return std::to_string(fd_); }
  std::string path() const { return format("/proc/{}/fd/{}", ::getpid(), fd_); }

 private:
  const int fd_;
};

MemorySlots::MemorySlots(int num_ranks) {
  grow(num_ranks);
  for (auto& manifest : manifests_) {
    manifest = std::make_unique<File>("echelon-manifest");
  }
  index_ = std::make_unique<File>("echelon-index");
  path_ = index_->path();
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
  const auto make = [](const std::string& kind, size_t rank) {
    return std::make_unique<File>(format("echelon-{}-{}", kind, rank));
  };
  for (size_t rank = ranks_.size(); rank < static_cast<size_t>(num_ranks);
       ++rank) {
    std::array<Slot, 2> slots;
    for (Slot& slot : slots) slot = {make("rank", rank), make("record", rank)};
    ranks_.push_back(std::move(slots));
  }
}

void MemorySlots::write_index() const {
  Index index;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const auto& [file, record] : ranks_[rank]) {
      index.slots.push_back(
          {static_cast<int64_t>(rank), file->number(), record->number()});
    }
  }
  for (size_t i = 0; i < manifests_.size(); ++i) {
    index.manifests.push_back(
        {static_cast<int64_t>(i), manifests_[i]->number(), ""});
  }
  echelon::write_index(path_, index);
}

// Ranks may have left half an index.
std::optional<int64_t> MemorySlots::collect() {
  write_index();
  return collect_checkpoints_in_memory(path_);
}

std::optional<int64_t> collect_checkpoints_in_memory(const std::string& path) {
  Index index = read_index(path);
  index.checkpoints.clear();
  std::vector<Record> records;
  for (const auto& slot : index.slots) {
    if (auto read = Record::read(slot.second)) {
      records.push_back(std::move(*read));
    }
  }
  // Those of a rank follow each other, so the records of a checkpoint are in
  // the order of the ranks.
  std::map<std::pair<int64_t, int64_t>, std::vector<const Record*>> saved;
  for (const Record& record : records) {
    saved[{record.manifest.step, record.generation}].push_back(&record);
  }
  for (auto at = saved.rbegin(); at != saved.rend(); ++at) {
    if (index.checkpoints.size() == index.manifests.size()) break;
    const auto& of_ranks = at->second;
    CheckpointManifest manifest = of_ranks.front()->manifest;
    if (static_cast<int64_t>(of_ranks.size()) != manifest.ranks) continue;
    std::vector<RankPart> parts;
    for (const Record* record : of_ranks) parts.push_back(record->part);
    try {
      add_parts(manifest, parts);
    } catch (const CheckpointError&) {
      continue;
    }
    const auto& file = index.manifests[index.checkpoints.size()].first;
    write_over(file, to_json(manifest));
    index.checkpoints.push_back({manifest.step, file, ""});
  }
  write_index(path, index);
  if (index.checkpoints.empty()) return std::nullopt;
  return index.checkpoints.front().number;
}

MemorySlot::MemorySlot(const std::string& index, int rank, int64_t kept_step) {
  size_t count = 0;
  for (const auto& slot : read_index(index).slots) {
    if (slot.number == rank && count < slots_.size()) {
      slots_[count++] = {slot.first, slot.second};
    }
  }
  if (count < slots_.size()) {
    throw CheckpointError(format("{}: has no slots of rank {}", index, rank));
  }
  const auto record = Record::read(slots_[0].record);
  next_ = record && record->manifest.step == kept_step ? 1 : 0;
}

void MemorySlot::write(
    const std::vector<SliceBytes>& slices, CheckpointManifest manifest,
    int generation) {
  const Paths& slot = slots_[next_];
  write_over(slot.record, "");
  const RankPart part = write_rank_file_over(slot.file, slices);
  write_over(slot.record, Record::text(generation, std::move(manifest), part));
  next_ = 1 - next_;
}

std::vector<CheckpointPlace> checkpoints_in_memory(const std::string& index) {
  std::vector<CheckpointPlace> places;
  for (const auto& line : read_index(index).checkpoints) {
    places.push_back({line.first, line.number});
  }
  return places;
}

void discard_checkpoints_in_memory(const std::string& index, int64_t step) {
  for (const auto& slot : read_index(index).slots) {
    const auto record = Record::read(slot.second);
    if (!record || record->manifest.step > step) write_over(slot.second, "");
  }
}

}  // namespace echelon
