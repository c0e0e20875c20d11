// The implementation of Host, for the files of this folder.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/comm/shared_memory/engine.h"
#include "echelon/comm/shared_memory/host.h"
#include "echelon/comm/shared_memory/monitor.h"
#include "echelon/comm/shared_memory/segment.h"

namespace echelon::local {

/// Memory of a peer that this process has mapped.
struct MappedArena {
  char* base = nullptr;
  size_t bytes = 0;
};

class Attachment : public Host {
 public:
  /// For threads: every rank can use every address.
  Attachment(std::shared_ptr<Segment> segment, int rank);
  ~Attachment() override;

  int rank() const override { return rank_; }
  int size() const override { return segment_->size(); }
  void publish_status(std::string_view status) override;
  std::string read_status(int rank) const override;

  Segment& segment() const { return *segment_; }
  Engine& engine() const { return *engine_; }

  /// Counts the groups of one name and ranks that this rank makes, from 0. The
  /// number tells a group from an earlier one that a slower peer has not left.
  uint64_t next_group(const std::string& key);

  /// For processes: peers see only memory in the arenas (by rank; may be
  /// empty).
  void separate(std::vector<MappedArena> arenas);
  void watch(std::unique_ptr<Monitor> monitor);

  /// True when every rank of the host can address [data, data + bytes);
  /// `offset` then says where.
  bool locate(const void* data, size_t bytes, uint64_t& offset) const {
    const auto address = reinterpret_cast<uint64_t>(data);
    if (!separate_) {
      offset = address;
      return true;
    }
    offset = 0;
    if (bytes == 0) {
      return true;
    }
    if (arenas_.empty()) {
      return false;
    }
    const auto base = reinterpret_cast<uint64_t>(arenas_[rank_].base);
    offset = address - base;
    return address >= base && offset + bytes <= arenas_[rank_].bytes;
  }
  /// The address of a peer's offset in this process.
  char* address(int rank, uint64_t offset) const {
    return separate_ ? arenas_[rank].base + offset
                     : reinterpret_cast<char*>(offset);
  }

 private:
  std::shared_ptr<Segment> segment_;
  int rank_;
  bool separate_ = false;
  std::vector<MappedArena> arenas_;
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<Monitor> monitor_;
  std::mutex mutex_;
  std::map<std::string, uint64_t> groups_made_;
};

}  // namespace echelon::local
