// A description has the lines "server ADDRESS PORT", "until GENERATION STEP"
// and "slot HOST NUMBER SIDE GENERATION STEP RANKS RANK". The manifest of a
// checkpoint names a file of another host "ADDRESS PORT HOST NUMBER SIDE". A
// copy of this host's own server is read in the same way.
#include "echelon/checkpoint/memory/memory_hosts.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "echelon/authentication/key.h"
#include "echelon/checkpoint/memory/memory_index.h"
#include "echelon/checkpoint/memory/memory_link.h"
#include "echelon/error.h"
#include "echelon/text/file_descriptor.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using memory_slots::Index;
using memory_slots::MemoryLink;
using memory_slots::Record;
using memory_slots::SlotPlace;

struct Server {
  std::string address;
  int port = 0;
  auto operator<=>(const Server&) const = default;
};

/// A slot that a host has.
struct Held {
  Server server;
  SlotPlace slot;  // without paths
  int64_t generation = 0;
  int64_t step = 0;
  int64_t ranks = 0;
  int64_t rank = 0;

  std::string request() const {
    return format("{} {} {}", slot.host, slot.number, slot.side);
  }
  std::string file_name() const {
    return format("{} {} {}", server.address, server.port, request());
  }
};

/// A host's description.
struct HostMemory {
  Server server;
  std::vector<std::pair<int64_t, int64_t>> until;  // generation and step
  std::vector<Held> slots;
};

HostMemory parse(const std::string& description) {
  HostMemory host;
  std::istringstream text(description);
  for (std::string kind; text >> kind;) {
    if (kind == "server") {
      text >> host.server.address >> host.server.port;
    } else if (kind == "until") {
      auto& [generation, step] = host.until.emplace_back();
      text >> generation >> step;
    } else {
      Held held{.server = host.server};
      text >> held.slot.host >> held.slot.number >> held.slot.side >>
          held.generation >> held.step >> held.ranks >> held.rank;
      host.slots.push_back(std::move(held));
    }
  }
  return host;
}

authentication::Key key_of(const Index& index) {
  const auto key = authentication::Key::from_hex(index.key);
  if (!key) throw CheckpointError("this host's memory has no server");
  return *key;
}

/// Connections to the servers, made when they are needed.
class Servers {
 public:
  explicit Servers(const std::string& index)
      : key_(key_of(Index::read(index))) {}

  int64_t size(const Server& server, const std::string& request) {
    const std::lock_guard lock(mutex_);
    return ask(server, [&](MemoryLink& link) { return link.ask(request); });
  }
  void read(
      const Server& server, const std::string& request,
      std::span<std::byte> to) {
    const std::lock_guard lock(mutex_);
    ask(server, [&](MemoryLink& link) {
      if (link.ask(request) != static_cast<int64_t>(to.size())) {
        throw CheckpointError("the answer has another length");
      }
      link.receive(to);
      return 0;
    });
  }
  std::string record(const Server& server, const std::string& slot) {
    const std::lock_guard lock(mutex_);
    std::string text;
    ask(server, [&](MemoryLink& link) {
      text.resize(static_cast<size_t>(link.ask("record " + slot)));
      link.receive(std::as_writable_bytes(std::span(text)));
      return 0;
    });
    return text;
  }

 private:
  /// A link that has failed is not used again.
  template <typename Request>
  int64_t ask(const Server& server, const Request& request) {
    auto& link = links_[server];
    if (!link) {
      link = std::make_unique<MemoryLink>(server.address, server.port, key_);
    }
    try {
      return request(*link);
    } catch (const CheckpointError&) {
      link.reset();
      throw;
    }
  }

  const authentication::Key key_;
  std::mutex mutex_;
  std::map<Server, std::unique_ptr<MemoryLink>> links_;
};

class SlotOfHost : public RemoteFile {
 public:
  SlotOfHost(std::shared_ptr<Servers> servers, Server server, std::string slot)
      : servers_(std::move(servers)),
        server_(std::move(server)),
        slot_(std::move(slot)),
        size_(servers_->size(server_, "size " + slot_)) {}

  int64_t size() const override { return size_; }
  void read(int64_t offset, std::span<std::byte> to) override {
    if (to.empty()) return;
    servers_->read(
        server_, format("read {} {} {}", slot_, offset, to.size()), to);
  }

 private:
  const std::shared_ptr<Servers> servers_;
  const Server server_;
  const std::string slot_;
  const int64_t size_;
};

}  // namespace

std::string describe_memory(const std::string& path) {
  const Index index = Index::read(path);
  if (index.key.empty()) return "";
  std::string text = format("server {} {}\n", index.address, index.port);
  for (const auto& [generation, step] : index.until) {
    text += format("until {} {}\n", generation, step);
  }
  for (const SlotPlace& slot : index.slots) {
    const auto record = Record::read(slot.record);
    if (!record) continue;
    text += format(
        "slot {} {} {} {} {} {} {}\n", slot.host, slot.number, slot.side,
        record->generation, record->manifest.step, record->manifest.ranks,
        record->rank);
  }
  return text;
}

void go_on_from(const std::string& path, int64_t generation, int64_t step) {
  Index index = Index::read(path);
  index.until.emplace_back(generation - 1, step);
  index.write(path);
}

struct CommonCheckpoints::Found {
  std::string name;
  std::vector<Record> records;
};

CommonCheckpoints::CommonCheckpoints(
    const std::string& path, const std::vector<std::string>& hosts)
    : index_(path) {
  const Index index = Index::read(path);
  const Server here{index.address, index.port};
  // A slot of this host is read without its server.
  const auto own = [&](const Held& held) -> const SlotPlace* {
    if (held.server != here) return nullptr;
    const auto end = index.slots.begin() + static_cast<long>(index.own);
    const auto at =
        std::find_if(index.slots.begin(), end, [&](const auto& one) {
          return one.host == held.slot.host && one.number == held.slot.number &&
                 one.side == held.slot.side;
        });
    return at == end ? nullptr : &*at;
  };
  std::map<std::pair<int64_t, int64_t>, std::map<int64_t, Held>> saved;
  HostMemory all;
  for (const auto& text : hosts) {
    const HostMemory host = parse(text);
    all.until.insert(all.until.end(), host.until.begin(), host.until.end());
    all.slots.insert(all.slots.end(), host.slots.begin(), host.slots.end());
  }
  for (const Held& held : all.slots) {
    const bool over = std::ranges::any_of(all.until, [&](const auto& limit) {
      return held.generation <= limit.first && held.step > limit.second;
    });
    if (over) continue;
    auto& of_rank = saved[{held.generation, held.step}];
    const auto [at, added] = of_rank.emplace(held.rank, held);
    if (!added && own(held) != nullptr) at->second = held;
  }
  Servers servers(path);
  for (auto at = saved.rbegin(); at != saved.rend(); ++at) {
    if (found_.size() == index.manifests.size()) break;
    const auto& [place, of_rank] = *at;
    const int64_t ranks = of_rank.begin()->second.ranks;
    if (static_cast<int64_t>(of_rank.size()) != ranks) continue;
    Found found{format("{}:{}", place.first, place.second), {}};
    try {
      for (const auto& [rank, held] : of_rank) {
        const SlotPlace* slot = own(held);
        auto record = slot != nullptr
                          ? Record::read(slot->record)
                          : Record::parse(
                                servers.record(held.server, held.request()),
                                held.file_name());
        if (!record) break;
        if (slot == nullptr) record->part.file.name = held.file_name();
        found.records.push_back(std::move(*record));
      }
    } catch (const CheckpointError&) {
      continue;
    }
    if (memory_slots::are_all(found.records)) {
      found_.push_back(std::move(found));
    }
  }
}

CommonCheckpoints::~CommonCheckpoints() = default;

std::string CommonCheckpoints::found() const {
  std::string words;
  for (const Found& one : found_) words += one.name + " ";
  return words;
}

std::optional<int64_t>
CommonCheckpoints::list(const std::vector<std::string>& found) {
  Index index = Index::read(index_);
  index.checkpoints.clear();
  for (const Found& one : found_) {
    const bool everywhere = std::ranges::all_of(found, [&](const auto& words) {
      return (" " + words).find(" " + one.name + " ") != std::string::npos;
    });
    if (everywhere) memory_slots::add_checkpoint(index, one.records);
  }
  index.write(index_);
  if (index.checkpoints.empty()) return std::nullopt;
  return index.checkpoints.front().first;
}

OpenRemote remote_slots(const std::string& index) {
  auto servers = std::make_shared<std::shared_ptr<Servers>>();
  return
      [index, servers](const std::string& name) -> std::unique_ptr<RemoteFile> {
        std::istringstream words(name);
        Server server;
        std::string slot;
        words >> server.address >> server.port;
        if (!words || !std::getline(words >> std::ws, slot)) return nullptr;
        if (!*servers) *servers = std::make_shared<Servers>(index);
        return std::make_unique<SlotOfHost>(*servers, server, slot);
      };
}

struct SlotSender::Target {
  std::string host;  // this one's name
  MemoryLink link;
};

SlotSender::SlotSender(
    const std::string& path, const std::vector<std::string>& hosts,
    size_t own) {
  const Index index = Index::read(path);
  const Server next = parse(hosts[(own + 1) % hosts.size()]).server;
  target_ = std::make_unique<Target>(
      Target{index.host, MemoryLink(next.address, next.port, key_of(index))});
}

SlotSender::~SlotSender() = default;

void SlotSender::send(const WrittenSlot& slot) {
  const FileDescriptor file(::open(slot.file.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status = {};
  if (!file.is_open() || ::fstat(file.fd(), &status) != 0) {
    throw CheckpointError(format("{}: {}", slot.file, std::strerror(errno)));
  }
  MemoryLink& link = target_->link;
  link.send(format(
      "write {} {} {} {} {} {}\n", target_->host, slot.number, slot.side,
      slot.generation, status.st_size, slot.record.size()));
  link.send_file(file.fd(), 0, status.st_size);
  link.send(slot.record);
  link.answer();
}

}  // namespace echelon
