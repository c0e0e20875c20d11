#include "echelon/checkpoint/memory/memory_index.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon::memory_slots {

void write_over(const std::string& path, std::string_view text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
  int error = file < 0 ? errno : write_all(file, text);
  if (file >= 0 && ::close(file) != 0 && error == 0) error = errno;
  if (error != 0) {
    throw CheckpointError(
        format("{}: writing it failed: {}", path, std::strerror(error)));
  }
}

Index Index::read(const std::string& path) {
  Index index;
  std::istringstream text(read_text_file(path));
  for (std::string kind; text >> kind;) {
    if (kind == "host") {
      text >> index.host;
    } else if (kind == "slot") {
      SlotPlace slot{.host = index.host};
      text >> slot.number >> slot.side >> slot.file >> slot.record;
      index.slots.push_back(std::move(slot));
    } else if (kind == "manifest") {
      text >> index.manifests.emplace_back();
    } else if (kind == "checkpoint") {
      auto& [step, file] = index.checkpoints.emplace_back();
      text >> step >> file;
    } else if (kind == "copies") {
      text >> index.copies;
    } else if (kind == "server") {
      text >> index.address >> index.port >> index.key;
    } else if (kind == "until") {
      auto& [generation, step] = index.until.emplace_back();
      text >> generation >> step;
    }
  }
  index.own = index.slots.size();
  if (index.copies.empty()) return index;
  std::istringstream copies(read_text_file(index.copies));
  SlotPlace slot;
  for (std::string kind; copies >> kind >> slot.host >> slot.number >>
                         slot.side >> slot.file >> slot.record;) {
    index.slots.push_back(slot);
  }
  return index;
}

void Index::write(const std::string& path) const {
  std::string text = format("host {}\n", host);
  for (size_t i = 0; i < own; ++i) {
    text += format(
        "slot {} {} {} {}\n", slots[i].number, slots[i].side, slots[i].file,
        slots[i].record);
  }
  for (const auto& file : manifests) text += format("manifest {}\n", file);
  for (const auto& [step, file] : checkpoints) {
    text += format("checkpoint {} {}\n", step, file);
  }
  if (!copies.empty()) {
    text += format("copies {}\nserver {} {} {}\n", copies, address, port, key);
  }
  for (const auto& [generation, step] : until) {
    text += format("until {} {}\n", generation, step);
  }
  write_over(path, text);
}

std::string Record::text(
    int64_t generation, int64_t rank, CheckpointManifest manifest,
    const RankPart& part) {
  add_parts(manifest, {});  // sets the hashes
  const std::string head = to_json(manifest);
  return format("{} {} {}\n", generation, rank, head.size()) + head +
         to_json(part);
}

std::optional<Record>
Record::parse(const std::string& text, const std::string& place) {
  Record record;
  std::istringstream numbers(text);
  size_t head = 0;
  if (!(numbers >> record.generation >> record.rank >> head)) {
    return std::nullopt;
  }
  const size_t begin = text.find('\n') + 1;
  if (begin == 0 || head > text.size() - begin) return std::nullopt;
  try {
    record.manifest = parse_manifest(text.substr(begin, head), place);
    record.part = parse_rank_part(text.substr(begin + head), place);
  } catch (const CheckpointError&) {
    return std::nullopt;
  }
  return record;
}

std::optional<Record> Record::read(const std::string& path) {
  try {
    return parse(read_text_file(path), path);
  } catch (const DataError&) {
    return std::nullopt;
  }
}

MemoryFile::MemoryFile(const std::string& name)
    : fd_(::memfd_create(name.c_str(), MFD_CLOEXEC)) {
  if (fd_ < 0) {
    throw ConfigError(format(
        "[elastic] memory: no file in memory for {}: {}; `ulimit -n` sets "
        "how many there may be (four a rank), and memory = \"off\" needs "
        "none",
        name, std::strerror(errno)));
  }
}

MemoryFile::~MemoryFile() {
  ::close(fd_);
}

std::string MemoryFile::path() const {
  return format("/proc/{}/fd/{}", ::getpid(), fd_);
}

std::array<std::unique_ptr<MemoryFile>, 2> make_slot(size_t number) {
  return {
      std::make_unique<MemoryFile>(format("echelon-rank-{}", number)),
      std::make_unique<MemoryFile>(format("echelon-record-{}", number))};
}

bool are_all(const std::vector<Record>& records) {
  int64_t rank = 0;
  for (const Record& record : records) {
    if (record.rank != rank++) return false;
  }
  return !records.empty() && rank == records.front().manifest.ranks;
}

bool add_checkpoint(Index& index, const std::vector<Record>& records) {
  if (index.checkpoints.size() == index.manifests.size()) return false;
  CheckpointManifest manifest = records.front().manifest;
  std::vector<RankPart> parts;
  for (const Record& record : records) parts.push_back(record.part);
  try {
    add_parts(manifest, parts);
  } catch (const CheckpointError&) {
    return false;
  }
  const auto& file = index.manifests[index.checkpoints.size()];
  write_over(file, to_json(manifest));
  index.checkpoints.emplace_back(manifest.step, file);
  return true;
}

}  // namespace echelon::memory_slots
