// Whoever runs a receive takes in the fragments from its source, also those
// that belong to other receives. The first fragment of a message chooses where
// it goes: into the oldest posted receive with its tag, or into memory of its
// own, set aside until a receive asks for it. A receive that finds its message
// half arrived becomes its taker. The mutex guards all of it except `consumed`,
// which arrived() reads without the mutex.
#include "echelon/comm/shared_memory/mailbox.h"

#include <algorithm>
#include <cstring>

#include "echelon/comm/shared_memory/failure.h"
#include "echelon/text/format.h"

namespace echelon::local {

PeerAccess::PeerAccess(std::atomic<uint64_t>& accesses, const Supervisor& group)
    : accesses_(accesses) {
  accesses_.fetch_add(1, std::memory_order_seq_cst);
  if (group.failed()) {
    accesses_.fetch_sub(1, std::memory_order_release);
    throw CommError("[local] the group has failed");
  }
}

Mailbox::Mailbox(Wire wire) : wire_(std::move(wire)), sources_(wire_.size) {}

bool Mailbox::arrived(int source) const {
  const auto& channel = wire_.memory.channel(source, wire_.rank);
  return channel.head.load(std::memory_order_acquire) >
         sources_[source].consumed.load(std::memory_order_acquire);
}

bool Mailbox::fits(uint64_t bytes, Dtype dtype, Receive& receive) {
  if (bytes == receive.bytes && dtype == receive.dtype) {
    return true;
  }
  const auto text = [](uint64_t bytes, Dtype dtype) {
    return format("{} elements of {}", bytes / size_of(dtype), name_of(dtype));
  };
  receive.error = format(
      "recv({}, tag {}), but rank {} sent {}; the message is dropped",
      text(receive.bytes, receive.dtype), receive.tag, receive.source,
      text(bytes, dtype));
  return false;
}

void Mailbox::complete(Receive& receive) {
  receive.done.store(true, std::memory_order_release);
  ++completed_;
}

bool Mailbox::deliver(Message& message, Receive& receive) {
  if (!message.complete) {
    return false;
  }
  if (fits(message.bytes, message.dtype, receive) && message.bytes > 0) {
    std::memcpy(receive.data, message.data.get(), message.bytes);
  }
  complete(receive);
  return true;
}

void Mailbox::post(const std::shared_ptr<Receive>& receive) {
  receive->mailbox = this;
  std::lock_guard lock(mutex_);
  auto& source = sources_[receive->source];
  auto& aside = source.set_aside;
  const auto message =
      std::find_if(aside.begin(), aside.end(), [&](const Message& m) {
        return m.taker == nullptr && m.tag == receive->tag;
      });
  if (message == aside.end()) {
    source.posted.push_back(receive);
  } else if (deliver(*message, *receive)) {
    aside.erase(message);
  } else {
    message->taker = receive;
  }
}

// Finds where the message that begins with `fragment` goes.
void Mailbox::match(int from, const Fragment& fragment) {
  auto& source = sources_[from];
  source.position = 0;
  source.target = nullptr;
  source.incoming = nullptr;
  const auto found = std::find_if(
      source.posted.begin(), source.posted.end(),
      [&](const auto& r) { return r->tag == fragment.tag; });
  const auto dtype = static_cast<Dtype>(fragment.dtype);
  if (found != source.posted.end()) {
    source.target = *found;
    source.posted.erase(found);
    fits(fragment.total, dtype, *source.target);
    return;
  }
  Message& message = source.set_aside.emplace_back();
  message.tag = fragment.tag;
  message.dtype = dtype;
  message.bytes = fragment.total;
  message.data.reset(new char[fragment.total]);
  source.incoming = &message;
}

// Copies one fragment to its target, and completes the message with its last
// one.
void Mailbox::take(int from, const Fragment& fragment, const char* piece) {
  auto& source = sources_[from];
  if (fragment.first) {
    match(from, fragment);
  }
  char* to = nullptr;
  if (source.incoming != nullptr) {
    to = source.incoming->data.get();
  } else if (source.target->error.empty()) {
    to = source.target->data;
  }
  if (to != nullptr && fragment.bytes > 0) {
    std::memcpy(to + source.position, piece, fragment.bytes);
  }
  source.position += fragment.bytes;
  if (source.position < fragment.total) {
    return;
  }
  if (auto target = std::move(source.target)) {
    complete(*target);
  } else {
    Message& message = *source.incoming;
    message.complete = true;
    if (message.taker != nullptr) {
      deliver(message, *message.taker);
      source.set_aside.remove_if(
          [&](const Message& m) { return &m == &message; });
    }
  }
}

bool Mailbox::pump(Receive& receive) {
  std::lock_guard lock(mutex_);
  const uint64_t before = completed_;
  const bool was_done = receive.done;
  const int from = receive.source;
  auto& channel = wire_.memory.channel(from, wire_.rank);
  auto& source = sources_[from];
  while (!receive.done && arrived(from)) {
    const uint64_t k = source.consumed.load(std::memory_order_relaxed);
    const Fragment fragment = channel.fragments[k % kFragments];
    if (fragment.direct) {
      PeerAccess access(wire_.memory.accesses(wire_.rank), wire_.group);
      take(from, fragment, wire_.address(from, fragment.offset));
    } else {
      take(
          from, fragment,
          wire_.segment.at(channel.data.load(std::memory_order_acquire)) +
              k % kFragments * kFragmentBytes);
    }
    source.consumed.store(k + 1, std::memory_order_release);
    channel.tail.store(k + 1, std::memory_order_seq_cst);
    wire_.ring(from);
  }
  return completed_ - before > (receive.done && !was_done ? 1u : 0u);
}

}  // namespace echelon::local
