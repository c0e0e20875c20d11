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

namespace echelon {
namespace {

std::string path_of(int fd) {
  return format("/proc/{}/fd/{}", ::getpid(), fd);
}

[[noreturn]] void fail(const std::string& path, const char* doing) {
  throw CheckpointError(
      format("{}: {} failed: {}", path, doing, std::strerror(errno)));
}

void write_text(int fd, const std::string& path, std::string_view text) {
  if (::ftruncate(fd, 0) != 0) fail(path, "emptying it");
  off_t at = 0;
  while (!text.empty()) {
    const ssize_t bytes = ::pwrite(fd, text.data(), text.size(), at);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) fail(path, "writing it");
    at += bytes;
    text.remove_prefix(static_cast<size_t>(bytes));
  }
}

std::string read_text(int fd, const std::string& path) {
  std::string text;
  std::vector<char> buffer(1 << 16);
  for (;;) {
    const ssize_t bytes = ::pread(
        fd, buffer.data(), buffer.size(), static_cast<off_t>(text.size()));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) fail(path, "reading it");
    if (bytes == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(bytes));
  }
}

// A file of the launcher, opened by a rank.
class OpenFile {
 public:
  OpenFile(const std::string& path, int flags)
      : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (fd_ < 0) fail(path, "opening it");
  }
  ~OpenFile() { ::close(fd_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  void write(std::string_view text) { write_text(fd_, path_, text); }
  std::string read() const { return read_text(fd_, path_); }

 private:
  std::string path_;
  int fd_;
};

// The index's lines: "slot RANK FILE RECORD" and "checkpoint STEP MANIFEST".
struct Index {
  struct Line {
    int64_t number = 0;  // rank or step
    std::string first;   // files
    std::string second;
  };
  std::vector<Line> slots;
  std::vector<Line> checkpoints;
};

Index read_index(const std::string& path) {
  Index index;
  std::istringstream text(OpenFile(path, O_RDONLY).read());
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  std::string kind;
  Index::Line line;
  while (text >> kind >> line.number >> line.first) {
    line.first.insert(0, folder);
    if (kind == "checkpoint") {
      index.checkpoints.push_back(line);
    } else if (text >> line.second) {
      line.second.insert(0, folder);
      index.slots.push_back(line);
    }
  }
  return index;
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
  static std::optional<Record>
  parse(const std::string& text, const std::string& path) {
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

  int fd() const { return fd_; }
  void write(std::string_view text) { write_text(fd_, path_of(fd_), text); }
  std::string read() const { return read_text(fd_, path_of(fd_)); }

 private:
  int fd_;
};

MemorySlots::MemorySlots(int num_ranks)
    : ranks_(static_cast<size_t>(num_ranks)) {
  const auto make = [](const std::string& name) {
    return std::make_unique<File>("echelon-" + name);
  };
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (Slot& slot : ranks_[rank]) {
      slot = {make(format("rank-{}", rank)), make(format("record-{}", rank))};
    }
  }
  for (auto& manifest : manifests_) manifest = make("manifest");
  index_ = make("index");
  path_ = path_of(index_->fd());
  write_index({});
}

MemorySlots::~MemorySlots() = default;

void MemorySlots::write_index(const std::vector<CheckpointPlace>& checkpoints) {
  std::string text;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const auto& [file, record] : ranks_[rank]) {
      text += format("slot {} {} {}\n", rank, file->fd(), record->fd());
    }
  }
  for (const auto& [path, step] : checkpoints) {
    text += format("checkpoint {} {}\n", step, path.filename().string());
  }
  index_->write(text);
}

std::optional<int64_t> MemorySlots::collect() {
  std::vector<Record> records;
  for (const auto& slots : ranks_) {
    for (const auto& [file, record] : slots) {
      if (auto read = Record::parse(record->read(), path_of(record->fd()))) {
        records.push_back(std::move(*read));
      }
    }
  }
  // Those of a rank follow each other, so the records of a checkpoint are in
  // the order of the ranks.
  std::map<std::pair<int64_t, int64_t>, std::vector<const Record*>> saved;
  for (const Record& record : records) {
    saved[{record.manifest.step, record.generation}].push_back(&record);
  }
  std::vector<CheckpointPlace> complete;
  for (auto at = saved.rbegin();
       at != saved.rend() && complete.size() < manifests_.size(); ++at) {
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
    File& file = *manifests_[complete.size()];
    file.write(to_json(manifest));
    complete.push_back({path_of(file.fd()), manifest.step});
  }
  write_index(complete);
  if (complete.empty()) return std::nullopt;
  return complete.front().step;
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
  const std::string& path = slots_[0].record;
  const auto record = Record::parse(OpenFile(path, O_RDONLY).read(), path);
  next_ = record && record->manifest.step == kept_step ? 1 : 0;
}

void MemorySlot::write(
    const std::vector<SliceBytes>& slices, CheckpointManifest manifest,
    int generation) {
  const Paths& slot = slots_[next_];
  OpenFile record(slot.record, O_WRONLY);
  record.write("");
  const RankPart part = write_rank_file_over(slot.file, slices);
  record.write(Record::text(generation, std::move(manifest), part));
  next_ = 1 - next_;
}

std::vector<CheckpointPlace> checkpoints_in_memory(const std::string& index) {
  std::vector<CheckpointPlace> places;
  for (const auto& line : read_index(index).checkpoints) {
    places.push_back({line.first, line.number});
  }
  return places;
}

void discard_checkpoints_in_memory(const std::string& index) {
  for (const auto& slot : read_index(index).slots) {
    OpenFile(slot.second, O_WRONLY).write("");
  }
}

}  // namespace echelon
