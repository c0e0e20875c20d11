// Batches, prefetched by threads while the model computes. Batches that take
// less time than a switch of threads are loaded by the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "echelon/data/dataset.h"
#include "echelon/data/sources/order.h"

namespace echelon {

struct LoaderOptions {
  std::vector<int64_t> samples;     // dataset indices, as those of a Split
  int64_t global_batch = 64;        // samples per batch, over all ranks
  int64_t rank = 0;                 // data-parallel rank ...
  int64_t num_ranks = 1;            // ... of so many
  std::vector<int64_t> rank_batch;  // samples per rank; empty: equal shares
  uint64_t seed = 0;
  bool shuffle = true;
  bool training = true;      // with random crops and flips
  bool drop_last = false;    // skip a last batch that is not full
  bool sample_keys = false;  // Batch::more ends with the samples' keys
  int64_t workers = 2;       // threads
  int64_t prefetch = 2;      // batches
  bool pin_memory = true;    // if there is a GPU
};

/// Samples that are left out, from `begin` to before `end`.
struct Window {
  Position begin, end;
};

/// Iterates over the epochs of a data set. A global batch is the next
/// global_batch samples of the epoch's order (the last one may be smaller), and
/// this rank gets its rank_share() of it. Threads load single samples, not
/// batches, so that all of them work on the next batch. If the data is in
/// memory and a rank's part of a batch takes less than 50 us, next() loads it
/// and there are no threads.
///
/// From a stream (SampleStream), a global batch is the next global_batch
/// samples, each rank takes its rank_share() of a full one, and one thread
/// reads ahead.
///
/// One thread uses a loader. It may be destroyed at any time; its threads first
/// finish the samples that they are loading.
class Loader {
 public:
  /// `dataset` outlives the loader. Starts at epoch 0. Throws ConfigError, also
  /// when `drop_last` would leave no batch. For a stream, options.samples is
  /// empty.
  Loader(const Dataset& dataset, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Begins epoch `epoch` at its first sample.
  void start_epoch(int64_t epoch);

  /// This rank's part of the next batch, or nothing at the end of the epoch;
  /// call start_epoch() then. The part has 0 samples when the last batch is too
  /// small for all ranks: every rank sees the same number of batches. Throws
  /// DataError, which names the first broken sample of the batch; that batch is
  /// lost, and the next call gives the one after it. Throws DataError when the
  /// size of the data set is no longer what it was.
  ///
  /// The tensors belong to the caller. The memory of batches that nobody holds
  /// any more is reused.
  std::optional<Batch> next();

  /// The position after the batches that next() has returned; the same on all
  /// ranks.
  Position position() const;
  /// True when the epoch has no further batch. Waits for a stream's next one.
  bool at_end() const;
  /// Continues from `position`, which may have been saved with other numbers of
  /// ranks or batch sizes. Throws ConfigError when it is outside of the epoch.
  void seek(const Position& position);

  /// From the next batch on, the ranks take so many samples of a full one, as
  /// LoaderOptions::rank_batch has them. Call it on all ranks after the same
  /// batch. Loads batches anew that were loaded ahead. Throws ConfigError as
  /// rank_share() does.
  void divide(std::vector<int64_t> rank_batch);

  /// Leaves these samples out too, from the next start_epoch() or seek() on.
  /// Positions stay those of all samples. A batch ends before a window, with
  /// fewer samples than others where it must; with drop_last it is left out
  /// then.
  void leave_out(const Window& window);

  /// Number of batches of an epoch, as if no samples were left out; 0 for a
  /// stream of unknown size.
  int64_t batches_per_epoch() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
