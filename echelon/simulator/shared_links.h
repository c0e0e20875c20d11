// Links that several transfers use at once: each gets an equal share.
//
// A transfer takes some seconds alone. While one of its links carries n
// transfers, each of them moves at 1/n of its speed; a transfer over several
// links moves at the speed of its most crowded one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <vector>

namespace echelon::simulator {

class SharedLinks {
 public:
  explicit SharedLinks(size_t num_links) : links_(num_links) {}

  /// Starts a transfer at `now`, which is never before an end that was taken.
  /// `links` must outlive the transfer. Returns its number, which is reused
  /// after its end.
  int32_t start(double now, double seconds, const std::vector<int32_t>& links);

  /// When the next transfer ends; infinity without one in flight.
  double next_end();
  /// Removes that transfer and returns its number.
  int32_t take_end();

 private:
  struct Transfer {
    double left = 0;       // seconds alone
    double pace = 0;       // seconds of `left` that pass in a second
    double since = 0;      // when `left` was up to date
    uint32_t version = 0;  // of its valid End; increases when it is reused
    const std::vector<int32_t>* links = nullptr;
  };
  struct End {
    double time;
    int32_t transfer;
    uint32_t version;
    bool operator>(const End& other) const {
      return time != other.time ? time > other.time : transfer > other.transfer;
    }
  };

  void update_paces(double now, const std::vector<int32_t>& links);
  void set_pace(double now, int32_t number);
  void drop_stale();

  std::vector<std::vector<int32_t>> links_;  // the transfers on each
  std::vector<Transfer> transfers_;
  std::vector<int32_t> unused_;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
};

/// Starts and ends of transfers on shared links, in order of time.
class TransferEvents {
 public:
  explicit TransferEvents(size_t num_links) : links_(num_links) {}

  /// The collective of a group in a slot, or a message: the caller's numbers.
  struct Name {
    int32_t slot = 0;
    int32_t number = 0;
  };
  struct Ended {
    Name name;
    double begin = 0;
    double end = 0;
  };

  /// Adds a transfer that begins at `time`, no earlier than the last end, and
  /// takes `seconds` alone. `links` must outlive it.
  void
  add(Name name, double time, double seconds,
      const std::vector<int32_t>& links);

  /// Advances to the next end of a transfer; empty without one in flight.
  std::optional<Ended> next();

 private:
  struct Start {
    double time = 0;
    Name name;
    double seconds = 0;
    const std::vector<int32_t>* links = nullptr;
    // Ties break by name, so the order of the calls of add() does not matter.
    bool operator>(const Start& other) const {
      if (time != other.time) return time > other.time;
      if (name.slot != other.name.slot) return name.slot > other.name.slot;
      return name.number > other.name.number;
    }
  };

  void begin(const Start& start);

  SharedLinks links_;
  std::priority_queue<Start, std::vector<Start>, std::greater<>> starts_;
  std::vector<Ended> moving_;  // by number of the transfer on links_
};

}  // namespace echelon::simulator
