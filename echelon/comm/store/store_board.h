// The status board of ranks that share nothing but the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <thread>

#include "echelon/comm/trace/status_board.h"

namespace echelon {

/// Sends this rank's status to the store twice a second when it changed, from a
/// thread of its own; reads are round trips. `store` is used by this alone.
class StoreBoard : public StatusBoard {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store);
  ~StoreBoard() override;
  void publish(int rank, const RankStatus& status) override;
  std::optional<RankStatus> read(int rank) override;

 private:
  void run();

  c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::condition_variable wake_;
  RankStatus status_;
  int rank_ = 0;
  bool changed_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace echelon
