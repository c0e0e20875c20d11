// The receiving side of a group's messages: matches the messages that arrive
// with the receives that were posted, by source and tag.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/comm/shared_memory/engine.h"
#include "echelon/comm/shared_memory/group_memory.h"
#include "echelon/comm/shared_memory/reduce.h"

namespace echelon::local {

class Mailbox;

/// One receive.
struct Receive {
  char* data = nullptr;
  uint64_t bytes = 0;
  Dtype dtype = Dtype::uint8;
  int source = 0;
  int tag = 0;

  const Mailbox* mailbox = nullptr;
  std::atomic<bool> done{false};
  std::string error;  // the message does not fit
};

/// While this object lives, this rank reads or writes memory of its peers.
/// Throws when the group has failed: a peer may have freed that memory then.
class PeerAccess {
 public:
  PeerAccess(std::atomic<uint64_t>& accesses, const Supervisor& group);
  ~PeerAccess() { accesses_.fetch_sub(1, std::memory_order_release); }
  PeerAccess(const PeerAccess&) = delete;

 private:
  std::atomic<uint64_t>& accesses_;
};

class Mailbox {
 public:
  struct Wire {
    const GroupMemory& memory;
    const Segment& segment;
    const Supervisor& group;
    int rank;
    int size;
    std::function<const char*(int from, uint64_t offset)> address;
    std::function<void(int r)> ring;
  };
  explicit Mailbox(Wire wire);

  /// Receives match messages in the order in which they are posted.
  void post(const std::shared_ptr<Receive>& receive);
  /// Takes in the fragments that have arrived, until `receive` is done. True
  /// when it completed another receive.
  bool pump(Receive& receive);
  /// True when a fragment from `source` is there to be taken in.
  bool arrived(int source) const;

 private:
  struct Message {
    int tag;
    Dtype dtype;
    uint64_t bytes;
    std::unique_ptr<char[]> data;
    bool complete = false;
    std::shared_ptr<Receive> taker;
  };
  struct Source {
    std::atomic<uint64_t> consumed{0};  // fragments
    std::list<std::shared_ptr<Receive>> posted;
    std::list<Message> set_aside;     // no receive asked for it yet
    std::shared_ptr<Receive> target;  // of the message being taken in
    Message* incoming = nullptr;      // or where it is set aside
    uint64_t position = 0;
  };

  void take(int from, const Fragment& fragment, const char* piece);
  void match(int from, const Fragment& fragment);
  bool deliver(Message& message, Receive& receive);
  void complete(Receive& receive);
  static bool fits(uint64_t bytes, Dtype dtype, Receive& receive);

  Wire wire_;
  std::mutex mutex_;
  std::vector<Source> sources_;
  uint64_t completed_ = 0;
};

}  // namespace echelon::local
