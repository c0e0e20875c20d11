// The queue holds the batches that are being loaded, oldest first. Workers take
// runs of rows from the first batch that has any left, load them without the
// mutex, and count them as done; next() waits until all rows of the front are
// done. A batch is held by shared pointers, so begin() may clear the queue
// while workers still fill rows of it.
//
// A stream has one thread, which reads the next batch while the queue has less
// than `prefetch`, without the mutex; begin() waits until it does not read, and
// opens the stream anew. Each batch keeps the stream's position behind it, so
// that position() is that of the batches that were returned.
//
// An error of a row is stored in the row's own entry and thrown by next(), so
// the batch's first broken row is reported whichever worker was faster.
// Whatever depends on chance is keyed by seed, epoch and sample, and is the
// same for any number of workers.
#include "echelon/data/loader.h"

#include <ATen/DeviceAccelerator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include "echelon/data/sources/random.h"
#include "echelon/error.h"
#include "echelon/options/data.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

/// A batch that is being loaded: workers take its rows, next() waits for all.
struct Pending {
  Batch batch;
  SampleContext context;
  int64_t end = 0;         // position in the epoch after this batch
  std::string stream_end;  // the stream's, likewise

  // Guarded by the loader's mutex.
  size_t next_row = 0;
  size_t rows_done = 0;

  // Each entry is written by the one worker that has the row.
  std::vector<std::string> skipped;
  std::vector<std::exception_ptr> errors;

  size_t rows() const { return batch.indices.size(); }
};

using PendingPtr = std::shared_ptr<Pending>;

/// Rows [begin, end) of a pending batch.
struct Task {
  PendingPtr pending;
  size_t begin = 0;
  size_t end = 0;
};

void load_row(
    const Dataset& dataset, const SampleSpec& spec, Pending& pending,
    size_t row) {
  const auto& batch = pending.batch;
  try {
    dataset.load(
        batch.indices[row], pending.context, row_memory(batch, spec, row));
  } catch (const DataError& error) {
    if (dataset.may_skip()) {
      pending.skipped[row] = error.what();
    } else {
      pending.errors[row] = std::current_exception();
    }
  } catch (...) {
    pending.errors[row] = std::current_exception();
  }
}

/// The tensors of earlier batches, which are reused once only the loader holds
/// them: new memory of this size costs a page fault for every 4 KiB. Pinned
/// memory is not kept, since its allocator knows which copies to the GPU are
/// still running.
class BatchMemory {
 public:
  BatchMemory(SampleSpec spec, bool pinned, size_t most)
      : spec_(std::move(spec)), pinned_(pinned), most_(most) {}

  Batch get(int64_t n) {
    for (auto& kept : kept_) {
      if (kept.inputs.size(0) == n && unused(kept)) {
        std::swap(kept, kept_.back());
        return kept_.back();
      }
    }
    Batch batch = empty_batch(spec_, n, pinned_);
    if (n > 0 && !pinned_) {
      if (kept_.size() == most_) kept_.erase(kept_.begin());
      kept_.push_back(batch);
    }
    return batch;
  }

 private:
  static bool unused(const torch::Tensor& tensor) {
    return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  }
  static bool unused(const Batch& batch) {
    const auto all_unused = [](const auto& tensors) {
      return std::ranges::all_of(
          tensors, [](const auto& tensor) { return unused(tensor); });
    };
    return unused(batch.inputs) && unused(batch.targets) &&
           all_unused(batch.more) && all_unused(batch.more_targets);
  }

  SampleSpec spec_;
  bool pinned_;
  size_t most_;
  std::vector<Batch> kept_;
};

/// Whether `rows` samples load in less than kQuickBatchSeconds, estimated by
/// loading `sample` a few times.
bool is_quick(
    const Dataset& dataset, const SampleSpec& spec, int64_t sample,
    int64_t rows) {
  if (!dataset.in_memory()) return false;
  using Clock = std::chrono::steady_clock;
  const Batch batch = empty_batch(spec, 1);
  auto least = Clock::duration::max();
  for (int i = 0; i < 5; ++i) {
    const auto begin = Clock::now();
    try {
      dataset.load(sample, {}, row_memory(batch, spec, 0));
    } catch (...) {
      return false;  // reported by the batch that has this sample
    }
    least = std::min(least, Clock::now() - begin);
  }
  const auto all = std::chrono::duration<double>(least * rows);
  return all.count() < kQuickBatchSeconds;
}

std::vector<torch::Tensor*> tensors_of(Batch& batch) {
  std::vector<torch::Tensor*> tensors = {&batch.inputs, &batch.targets};
  for (auto& tensor : batch.more) tensors.push_back(&tensor);
  for (auto& tensor : batch.more_targets) tensors.push_back(&tensor);
  return tensors;
}

void require(bool good, const std::string& rule) {
  if (!good) throw ConfigError("data loader: " + rule);
}

}  // namespace

struct Loader::State {
  State(const Dataset& set, LoaderOptions given)
      : dataset(set),
        options(std::move(given)),
        rank_batch(options.rank_batch),
        spec(set.spec()),
        pinned(options.pin_memory && at::getAccelerator().has_value()),
        memory(spec, pinned, static_cast<size_t>(options.prefetch) + 3),
        size(dataset.size()),
        streams(dataset.is_stream()),
        quick(
            !options.samples.empty() &&
            is_quick(dataset, spec, options.samples.front(), rows())) {}

  const Dataset& dataset;
  const LoaderOptions options;
  std::vector<int64_t> rank_batch;
  const SampleSpec spec;
  const bool pinned;
  BatchMemory memory;
  const int64_t size;          // of the data set
  const bool streams;          // samples come from `stream`
  const bool quick;            // next() loads; no threads
  std::vector<int64_t> order;  // of the epoch
  Position position;
  int64_t scheduled = 0;  // samples of the epoch given to workers, or loaded
  std::vector<Window> left_out;
  std::vector<std::pair<int64_t, int64_t>> gaps;  // of the epoch, by begin

  std::mutex mutex;
  std::condition_variable work;   // for workers: rows to load, or stop
  std::condition_variable ready;  // for next(): a batch is complete
  std::deque<PendingPtr> queue;   // oldest first
  bool stop = false;
  std::vector<std::thread> threads;

  // Of a stream; its thread has them while `reading`, else the mutex's holder.
  std::unique_ptr<SampleStream> stream;
  bool reading = false;
  bool held = false;   // the thread shall not begin to read
  bool ended = false;  // the epoch, or by an error

  /// The samples of an epoch; of a stream, more than there can be.
  int64_t epoch_size() const {
    return streams ? std::numeric_limits<int64_t>::max() / 2
                   : static_cast<int64_t>(order.size());
  }

  void check_size() const {
    const int64_t now = dataset.size();
    if (now == size) return;
    throw DataError(format(
        "the data set had {} samples when it was opened and has {} now, in "
        "epoch {}; what it has must not change while a run uses it. The run "
        "resumes from its newest checkpoint when the data is as it was",
        size, now, position.epoch));
  }

  /// Samples of this rank in a full batch.
  int64_t rows() const {
    return rank_share(
               options.global_batch, options.rank, options.num_ranks,
               rank_batch)
        .size();
  }

  std::vector<int64_t> order_of(int64_t epoch) const {
    return options.training
               ? dataset.training_order(
                     options.samples, options.seed, epoch, options.shuffle)
               : epoch_order(
                     options.samples, options.seed, epoch, options.shuffle);
  }

  /// What the windows leave out of the epoch.
  std::vector<std::pair<int64_t, int64_t>> gaps_of(int64_t epoch) const {
    std::vector<std::pair<int64_t, int64_t>> all;
    for (const auto& [first, last] : left_out) {
      if (epoch < first.epoch || epoch > last.epoch) continue;
      all.emplace_back(
          epoch == first.epoch ? first.consumed : 0,
          epoch == last.epoch ? last.consumed : epoch_size());
    }
    std::ranges::sort(all);
    return all;
  }

  /// The samples [begin, end) of the next batch behind `from`; none at the end
  /// of the epoch.
  std::pair<int64_t, int64_t> batch_after(int64_t from) const {
    const int64_t total = epoch_size();
    int64_t begin = from;
    const auto batch_before = [&](int64_t limit) {
      return limit - begin >= (options.drop_last ? options.global_batch : 1);
    };
    for (const auto& [first, last] : gaps) {
      if (last <= begin) continue;
      if (first >= begin + options.global_batch) break;
      if (batch_before(first)) return {begin, first};
      begin = last;
    }
    if (!batch_before(total)) return {from, from};
    return {begin, std::min(total, begin + options.global_batch)};
  }

  /// int64 [n]: the keys of the random masks of these samples in this epoch.
  torch::Tensor keys_of(const std::vector<int64_t>& indices) const {
    auto keys = torch::empty(
        {static_cast<int64_t>(indices.size())},
        torch::TensorOptions().dtype(torch::kInt64).pinned_memory(pinned));
    auto* key = keys.data_ptr<int64_t>();
    for (const int64_t index : indices) {
      RandomStream random(
          RandomUse::sample_key,
          {options.seed, static_cast<uint64_t>(position.epoch),
           static_cast<uint64_t>(index)});
      *key++ = static_cast<int64_t>(random.bits());
    }
    return keys;
  }

  PendingPtr make_pending(int64_t begin, int64_t end) {
    const Share share =
        rank_share(end - begin, options.rank, options.num_ranks, rank_batch);
    auto pending = std::make_shared<Pending>();
    pending->batch = memory.get(share.size());
    if (streams) {
      pending->batch.indices.resize(static_cast<size_t>(share.size()));
      std::iota(
          pending->batch.indices.begin(), pending->batch.indices.end(),
          begin + share.begin);
    } else {
      check_size();
      pending->batch.indices.assign(
          order.begin() + begin + share.begin,
          order.begin() + begin + share.end);
    }
    if (options.sample_keys) {
      pending->batch.more.push_back(keys_of(pending->batch.indices));
    }
    pending->batch.global_count = end - begin;
    pending->batch.may_skip = dataset.may_skip();
    pending->context = {options.seed, position.epoch, options.training};
    pending->end = end;
    pending->skipped.resize(pending->rows());
    pending->errors.resize(pending->rows());
    return pending;
  }

  /// Loads the next batch; null at the end of the epoch.
  PendingPtr load_next() {
    const auto [begin, end] = batch_after(scheduled);
    if (end == begin) return nullptr;
    auto pending = make_pending(begin, end);
    scheduled = end;
    for (size_t row = 0; row < pending->rows(); ++row) {
      load_row(dataset, spec, *pending, row);
    }
    return pending;
  }

  /// Reads the next batch of the stream; null at the end of the epoch. At the
  /// end of the epoch a batch has the samples that there are, each rank those
  /// of its share of a full one.
  PendingPtr read_next() {
    const auto [begin, end] = batch_after(scheduled);
    if (begin > scheduled) stream->skip(begin - scheduled);
    const Share share =
        rank_share(end - begin, options.rank, options.num_ranks, rank_batch);
    auto pending = make_pending(begin, end);
    int64_t read = stream->skip(share.begin);
    size_t row = 0;
    bool more = read == share.begin;
    for (; more && row < pending->rows(); ++row) {
      more = read_row(*pending, row);
      if (!more) break;
    }
    read += static_cast<int64_t>(row);
    if (more) read += stream->skip(end - begin - share.end);
    if (read < end - begin && (read == 0 || options.drop_last)) return nullptr;
    auto& batch = pending->batch;
    batch.global_count = read;
    if (row < pending->rows()) {
      for (auto* tensor : tensors_of(batch)) {
        *tensor = tensor->narrow(0, 0, static_cast<int64_t>(row));
      }
      batch.indices.resize(row);
    }
    scheduled = pending->end = begin + read;
    pending->stream_end = stream->position();
    return pending;
  }

  /// False at the end of the epoch.
  bool read_row(Pending& pending, size_t row) {
    const std::string name = format(
        "sample {} of epoch {}", pending.batch.indices[row], position.epoch);
    try {
      const auto sample = stream->next();
      if (!sample) return false;
      copy_sample(*sample, spec, row_memory(pending.batch, spec, row), name);
    } catch (const DataError& error) {
      if (!dataset.may_skip()) throw;
      pending.skipped[row] = error.what();
    }
    return true;
  }

  // The loop of a stream's thread.
  void run_reader() {
    ::pthread_setname_np(::pthread_self(), "echelon-loader");
    std::unique_lock lock(mutex);
    while (true) {
      work.wait(lock, [&] {
        return stop || (!held && !ended && stream != nullptr &&
                        static_cast<int64_t>(queue.size()) <= options.prefetch);
      });
      if (stop) return;
      reading = true;
      lock.unlock();
      PendingPtr next;
      std::exception_ptr error;
      try {
        next = read_next();
      } catch (const Error&) {
        error = std::current_exception();
      } catch (const std::exception& what) {
        error = std::make_exception_ptr(DataError(format(
            "epoch {} of the data's stream: {}", position.epoch, what.what())));
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      reading = false;
      if (error) {
        next = std::make_shared<Pending>();
        next->end = scheduled;
        next->errors = {error};
      }
      ended = error || !next;
      if (next) queue.push_back(std::move(next));
      ready.notify_all();
    }
  }

  /// Opens the stream at this position. Its thread does not read.
  void open_stream(const Position& from) {
    check_size();
    stream = dataset.open({options.seed, from.epoch, options.training});
    if (!from.stream.empty()) {
      stream->seek(from.stream);
      return;
    }
    const int64_t there = stream->skip(from.consumed);
    if (there == from.consumed) return;
    throw DataError(format(
        "the data's stream has {} samples in epoch {}, and training has taken "
        "{} of it; the samples are no longer those of the run",
        there, from.epoch, from.consumed));
  }

  /// Waits until the next batch is read or the epoch has ended. Needs the
  /// mutex.
  void wait_for_stream(std::unique_lock<std::mutex>& lock) {
    ready.wait(lock, [&] { return !queue.empty() || (ended && !reading); });
  }

  /// Waits for the oldest batch of the queue; null at the end of the epoch.
  PendingPtr take_next() {
    std::unique_lock lock(mutex);
    if (streams) wait_for_stream(lock);
    if (queue.empty()) return nullptr;
    if (streams) {
      auto pending = queue.front();
      queue.pop_front();
      work.notify_all();
      return pending;
    }
    auto pending = queue.front();
    ready.wait(lock, [&] { return pending->rows_done == pending->rows(); });
    queue.pop_front();
    return pending;
  }

  /// Keeps `prefetch` batches in the queue beyond the one that next() returns.
  void schedule() {
    if (quick || streams) return;
    while (static_cast<int64_t>(queue.size()) <= options.prefetch) {
      const auto [begin, end] = batch_after(scheduled);
      if (end == begin) return;
      auto pending = make_pending(begin, end);
      scheduled = end;
      {
        const std::lock_guard lock(mutex);
        queue.push_back(std::move(pending));
      }
      work.notify_all();
    }
  }

  /// Some rows that no worker has taken, or nothing. Needs the mutex.
  Task take() {
    for (const auto& pending : queue) {
      const size_t rows = pending->rows();
      if (pending->next_row == rows) continue;
      // Many small samples at once, but enough tasks for all workers.
      const size_t pieces = 8 * static_cast<size_t>(options.workers);
      const size_t piece = std::clamp<size_t>(rows / pieces, 1, 64);
      const size_t begin = pending->next_row;
      pending->next_row = std::min(rows, begin + piece);
      return {pending, begin, pending->next_row};
    }
    return {};
  }

  // A worker's loop. The mutex is held except while rows are loaded.
  void run_worker() {
    ::pthread_setname_np(::pthread_self(), "echelon-loader");
    std::unique_lock lock(mutex);
    while (true) {
      Task task;
      work.wait(lock, [&] {
        if (stop) return true;
        task = take();
        return task.pending != nullptr;
      });
      if (stop) return;
      lock.unlock();
      for (size_t row = task.begin; row < task.end; ++row) {
        load_row(dataset, spec, *task.pending, row);
      }
      lock.lock();
      task.pending->rows_done += task.end - task.begin;
      if (task.pending->rows_done == task.pending->rows()) ready.notify_all();
    }
  }

  void begin(const Position& from) {
    if (streams) {
      std::unique_lock lock(mutex);
      held = true;
      ready.wait(lock, [&] { return !reading; });
      queue.clear();
      stream.reset();
      position = from;
      scheduled = from.consumed;
      gaps = gaps_of(from.epoch);
      open_stream(from);
      held = ended = false;
      work.notify_all();
      return;
    }
    check_size();
    {
      // Workers still finish their rows, in memory that they hold.
      const std::lock_guard lock(mutex);
      queue.clear();
    }
    if (order.empty() || from.epoch != position.epoch) {
      order = order_of(from.epoch);
    }
    position = from;
    scheduled = from.consumed;
    gaps = gaps_of(from.epoch);
    schedule();
  }
};

Loader::Loader(const Dataset& dataset, LoaderOptions options) {
  require(options.global_batch > 0, "global_batch must be 1 or more");
  require(options.workers > 0, "workers must be 1 or more");
  require(options.prefetch > 0, "prefetch must be 1 or more");
  const auto samples = static_cast<int64_t>(options.samples.size());
  require(
      !options.drop_last || dataset.is_stream() ||
          samples >= options.global_batch,
      format(
          "drop_last leaves nothing of {} samples in batches of {}", samples,
          options.global_batch));
  for (const int64_t index : options.samples) {
    if (index >= 0 && index < dataset.size()) continue;
    require(
        false, format(
                   "sample {} is outside of the data set's {}", index,
                   dataset.size()));
  }
  rank_share(
      options.global_batch, options.rank, options.num_ranks,
      options.rank_batch);
  state_ = std::make_unique<State>(dataset, std::move(options));
  int64_t workers = state_->quick ? 0 : state_->options.workers;
  if (state_->streams) workers = 1;
  // Before there are threads, which an error would leave behind.
  state_->begin({});
  for (int64_t i = 0; i < workers; ++i) {
    state_->threads.emplace_back([state = state_.get()] {
      state->streams ? state->run_reader() : state->run_worker();
    });
  }
}

Loader::~Loader() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->work.notify_all();
  for (auto& thread : state_->threads) thread.join();
}

void Loader::start_epoch(int64_t epoch) {
  require(epoch >= 0, "epoch must be 0 or more");
  state_->begin({epoch, 0});
}

std::optional<Batch> Loader::next() {
  auto& state = *state_;
  const PendingPtr pending =
      state.quick ? state.load_next() : state.take_next();
  if (!pending) return std::nullopt;
  state.position.consumed = pending->end;
  state.position.stream = pending->stream_end;
  Batch batch = std::move(pending->batch);
  pending->batch = {};
  for (const auto& error : pending->errors) {
    if (error) {
      batch = {};
      state.schedule();
      std::rethrow_exception(error);
    }
  }
  drop_rows(batch, pending->skipped);
  state.schedule();
  return batch;
}

Position Loader::position() const {
  return state_->position;
}

bool Loader::at_end() const {
  if (state_->streams) {
    std::unique_lock lock(state_->mutex);
    state_->wait_for_stream(lock);
    return state_->queue.empty();
  }
  const auto [begin, end] = state_->batch_after(state_->position.consumed);
  return begin == end;
}

void Loader::seek(const Position& position) {
  const auto total = static_cast<int64_t>(state_->options.samples.size());
  require(
      position.epoch >= 0 && position.consumed >= 0 &&
          (position.consumed <= total || state_->streams),
      format(
          "position {} of epoch {} is outside of the {} samples of an epoch",
          position.consumed, position.epoch, total));
  state_->begin(position);
}

void Loader::divide(std::vector<int64_t> rank_batch) {
  const auto& options = state_->options;
  rank_share(options.global_batch, options.rank, options.num_ranks, rank_batch);
  state_->rank_batch = std::move(rank_batch);
  state_->begin(state_->position);
}

void Loader::leave_out(const Window& window) {
  state_->left_out.push_back(window);
}

int64_t Loader::batches_per_epoch() const {
  const auto& options = state_->options;
  const auto samples = state_->streams
                           ? std::max<int64_t>(0, state_->size)
                           : static_cast<int64_t>(options.samples.size());
  return echelon::batches_per_epoch(
      samples, options.global_batch, options.drop_last);
}

}  // namespace echelon
