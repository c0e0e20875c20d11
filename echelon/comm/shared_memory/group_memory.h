// A group's block in the segment: the members' descriptors and counters, and
// the buffers that bytes pass through when a member's memory cannot be used in
// place.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "echelon/comm/shared_memory/segment.h"

namespace echelon::local {

inline constexpr size_t kPayloadBytes = 64 << 10;    // per rank, twice
inline constexpr size_t kFragmentBytes = 256 << 10;  // of a message
inline constexpr int kFragments = 4;                 // in flight per pair
inline constexpr int kMaxDims = 8;
inline constexpr size_t kMaxLabel = 64;

struct alignas(128) Counter {
  std::atomic<uint64_t> value;
};

/// One rank's call of a collective. There are two per rank, by the sequence's
/// parity: nobody enters sequence s + 2 before all have left s.
struct Descriptor {
  std::atomic<uint64_t> stamp;  // sequence + 1
  uint64_t count;               // elements of the shape
  uint64_t offset;              // of the buffer, if `direct`
  int64_t shape[kMaxDims];
  int32_t root;  // or -1
  uint8_t operation, dtype, reduction;
  uint8_t num_dims;       // kMaxDims + 1: only the count is known
  uint8_t direct;         // peers can address the buffers
  uint8_t in_payload;     // the bytes are in the payload already
  char label[kMaxLabel];  // the end of it, and zeros
};

/// The elements that a rank has for another one, and expects from it.
struct Part {
  uint64_t offset;
  uint64_t count;
  uint64_t expected;
};

/// A piece of a message.
struct Fragment {
  uint64_t bytes;   // of this piece
  uint64_t total;   // of the message
  uint64_t offset;  // of the sender's memory, if `direct`
  int32_t tag;
  uint8_t dtype;
  uint8_t first;
  uint8_t direct;
};

/// From one rank to another: `head` written by the sender, `tail` by the
/// receiver.
struct Channel {
  alignas(128) std::atomic<uint64_t> head;
  alignas(128) std::atomic<uint64_t> tail;
  alignas(128) std::atomic<uint64_t> data;  // the buffer's offset; 0: none yet
  Fragment fragments[kFragments];
};

/// The layout of the block of a group of `size` ranks.
class GroupMemory {
 public:
  explicit GroupMemory(int size) : size_(size) {
    size_t at = sizeof(Head);
    const auto place = [&](size_t bytes, size_t align) {
      at = (at + align - 1) / align * align;
      const size_t here = at;
      at += bytes;
      return here;
    };
    const size_t n = size;
    accesses_ = place(n * sizeof(Counter), 128);
    progress_ = place(n * sizeof(Counter), 128);
    descriptor_bytes_ =
        (sizeof(Descriptor) + n * sizeof(Part) + 127) / 128 * 128;
    descriptors_ = place(2 * n * descriptor_bytes_, 128);
    channels_ = place(n * n * sizeof(Channel), kPage);
    payloads_ = place(2 * n * kPayloadBytes, kPage);
    // Together they should stay in the last-level cache.
    stage_bytes_ =
        std::clamp<size_t>((16 << 20) / n, 128 << 10, 1 << 20) / kPage * kPage;
    stages_ = place(2 * n * stage_bytes_, kPage);
    results_ = place(2 * stage_bytes_, kPage);
    bytes_ = at;
  }

  void bind(char* base) { base_ = base; }
  size_t bytes() const { return bytes_; }
  size_t stage_bytes() const { return stage_bytes_; }

  Verdict& verdict() const { return head().verdict; }
  std::atomic<uint64_t>& arrivals() const { return head().arrivals.value; }
  std::atomic<uint64_t>& claims(uint64_t s) const {
    return head().claims[s % 4].value;
  }
  std::atomic<uint64_t>& finished(uint64_t s) const {
    return head().finished[s % 4].value;
  }
  /// The counter is not 0 while rank r accesses its peers' memory.
  std::atomic<uint64_t>& accesses(int r) const {
    return at<Counter>(accesses_)[r].value;
  }
  /// The number of phases that rank r has arrived in.
  std::atomic<uint64_t>& progress(int r) const {
    return at<Counter>(progress_)[r].value;
  }
  Descriptor& descriptor(int r, uint64_t s) const {
    return *at<Descriptor>(descriptors_ + (2 * r + s % 2) * descriptor_bytes_);
  }
  Part* parts(int r, uint64_t s) const {
    return reinterpret_cast<Part*>(&descriptor(r, s) + 1);
  }
  Channel& channel(int from, int to) const {
    return at<Channel>(channels_)[from * size_ + to];
  }
  char* payload(int r, uint64_t s) const {
    return at<char>(payloads_ + (2 * r + s % 2) * kPayloadBytes);
  }
  char* stage(int r, uint64_t step) const {
    return at<char>(stages_ + (2 * r + step % 2) * stage_bytes_);
  }
  char* result(uint64_t step) const {
    return at<char>(results_ + step % 2 * stage_bytes_);
  }

 private:
  struct Head {
    Verdict verdict;
    Counter arrivals;
    Counter claims[4];  // chunks of a direct all_reduce, by sequence
    Counter finished[4];
  };
  Head& head() const { return *at<Head>(0); }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  char* base_ = nullptr;
  int size_;
  size_t accesses_, progress_, descriptors_, descriptor_bytes_, channels_,
      payloads_, stages_, stage_bytes_, results_, bytes_;
};

}  // namespace echelon::local
