// Links that several transfers use at once: each gets an equal share.
//
// A transfer takes some seconds alone. While a link of its carries n of them,
// each moves at 1/n of that pace; a transfer over several links goes at the
// pace of the most crowded one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

namespace echelon::simulator {

class SharedLinks {
 public:
  explicit SharedLinks(size_t num_links) : links_(num_links) {}

  /// Begins at `now`, which is never before an end that was taken. `links` must
  /// outlive the transfer. Returns its number, which is used again after its
  /// end.
  int32_t start(double now, double seconds, const std::vector<int32_t>& links);

  /// When the next one ends; infinity when none is on its way.
  double next_end();
  /// Takes that one out and returns its number.
  int32_t take_end();

 private:
  struct Transfer {
    double left = 0;   // seconds alone
    double pace = 0;   // of them in a second
    double since = 0;  // when `left` was true
    uint32_t version =
        0;  // of its End that counts; goes on when it is used again
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

  void pace_again(double now, const std::vector<int32_t>& links);
  void set_pace(double now, int32_t number);
  void drop_stale();

  std::vector<std::vector<int32_t>> links_;  // the transfers on each
  std::vector<Transfer> transfers_;
  std::vector<int32_t> unused_;
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
};

}  // namespace echelon::simulator
