// join(): ranks that still have data announce each collective call beforehand
// by a small sum, in which every rank has one place. Ranks without data answer
// "ended" and take part with zeros, until all have ended; then all get the
// state of a rank that took part in the last event.
#include "echelon/parallel/data/distributed_data_parallel.h"

#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <unordered_set>

#include "echelon/error.h"
#include "echelon/parallel/data/coalesced.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

// The parameters by their first name; one that modules share is listed once.
std::vector<NamedParameter> unique_parameters(
    const torch::nn::Module& module,
    const DistributedDataParallelOptions& options) {
  std::vector<NamedParameter> result;
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (options.leaves_out && options.leaves_out(item.key())) continue;
    if (item.value().defined() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.push_back({item.key(), item.value()});
    }
  }
  return result;
}

std::vector<Tensor> buffers_of(const torch::nn::Module& module) {
  std::vector<Tensor> result;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) result.push_back(item.value());
  }
  return result;
}

std::string by_x(at::IntArrayRef values) {
  return values.empty() ? "scalar" : join(values, "x");
}

std::string
describe(const char* kind, const std::string& name, const Tensor& tensor) {
  std::string text = format(
      "{} \"{}\" {} {}", kind, name, by_x(tensor.sizes()),
      c10::toString(tensor.scalar_type()));
  if (!tensor.is_contiguous()) text += " strides " + by_x(tensor.strides());
  if (tensor.requires_grad()) text += " trainable";
  return text;
}

std::vector<std::string> describe(
    const torch::nn::Module& module,
    const DistributedDataParallelOptions& options) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : unique_parameters(module, options)) {
    lines.push_back(describe("parameter", name, tensor));
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      lines.push_back(describe("buffer", item.key(), item.value()));
    }
  }
  return lines;
}

std::string rank_list(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + join(ranks, ", ");
}

std::string line_at(const std::vector<std::string>& lines, size_t i) {
  return i < lines.size() ? lines[i] : "nothing more";
}

// Every rank sees all descriptions, so all ranks throw the same error.
void check_same_model(
    const torch::nn::Module& module,
    const DistributedDataParallelOptions& options, const Group& group,
    torch::Device device) {
  const auto all =
      gather_lines(describe(module, options), group, device, "compare models");
  for (size_t i = 0;; ++i) {
    std::vector<int> same, different;
    for (int rank = 0; rank < group.size(); ++rank) {
      const bool equal = line_at(all[rank], i) == line_at(all[0], i);
      (equal ? same : different).push_back(rank);
    }
    if (!different.empty()) {
      throw ConfigError(format(
          "[data parallel] the models of axis {} differ: at position {}, {} "
          "has {}, {} has {}; build the same model on every rank",
          group.axis(), i, rank_list(same), line_at(all[0], i),
          rank_list(different), line_at(all[different[0]], i)));
    }
    if (i >= all[0].size()) return;
  }
}

torch::Device device_of(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    if (parameter.defined()) return parameter.device();
  }
  for (const auto& buffer : module.buffers()) {
    if (buffer.defined()) return buffer.device();
  }
  return torch::kCPU;
}

void check_positive(const char* name, int64_t value) {
  if (value >= 1) return;
  throw ConfigError(
      format("[data parallel] {}={}; at least 1 byte is needed", name, value));
}

// What the ranks do next: announced to those that have run out of data.
constexpr int64_t kEnded = 0;
constexpr int64_t kBroadcastBuffers = 1;
constexpr int64_t kBackward = 2;
constexpr int64_t kCount = 3;

int lowest_active(const std::vector<int64_t>& events) {
  for (size_t rank = 0; rank < events.size(); ++rank) {
    if (events[rank] != kEnded) return static_cast<int>(rank);
  }
  return -1;
}

int64_t num_active(const std::vector<int64_t>& events) {
  return static_cast<int64_t>(events.size()) -
         std::count(events.begin(), events.end(), kEnded);
}

}  // namespace

// ---------------------------------------------------------------------- Join

struct DataParallelModule::Join {
  JoinOptions options;
  int last_source = 0;  // a rank that took part in the last event
};

// Announces what this rank does next; returns what each rank does.
std::vector<int64_t> DataParallelModule::announce(int64_t event) {
  std::vector<int64_t> own(group_.size(), 0);
  own[group_.rank()] = event;
  const auto all = sum_numbers(own, group_, device_of(module_), "join");
  const int source = lowest_active(all);
  if (source < 0) return all;
  join_->last_source = source;
  std::vector<int> ended;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (all[rank] == kEnded) {
      ended.push_back(rank);
    } else if (all[rank] != all[source]) {
      throw CommError(format(
          "[join] {} and {} of axis {} do different things in one iteration; "
          "every rank's iteration makes the same calls of the wrapper",
          rank_list({source}), rank_list({rank}), group_.axis()));
    }
  }
  if (!ended.empty() && join_->options.throw_on_early_termination) {
    throw DataError(format(
        "[join] {} of axis {} ran out of data before the others, and "
        "throw_on_early_termination is set",
        rank_list(ended), group_.axis()));
  }
  return all;
}

int64_t DataParallelModule::divisor_of(int64_t active) const {
  const bool initial = !join_ || join_->options.divide_by_initial_size;
  return initial ? group_.size() : active;
}

// Takes part, with zeros, in what the other ranks announce.
void DataParallelModule::shadow_until_all_ended() {
  torch::NoGradGuard no_grad;
  for (;;) {
    const auto events = announce(kEnded);
    const int source = lowest_active(events);
    if (source < 0) return;
    switch (events[source]) {
      case kBroadcastBuffers:
        broadcast_tensors(buffers_of(module_), source, group_, "buffers");
        break;
      case kBackward:
        reducer_->shadow(
            {.divisor = divisor_of(num_active(events)), .source = source});
        break;
      case kCount:
        sum_numbers({0}, group_, device_of(module_), "batch size");
        break;
    }
  }
}

void DataParallelModule::join(
    const std::function<void()>& body, const JoinOptions& options) {
  if (!reducer_) return body();
  if (join_) {
    throw ConfigError("[join] join() inside of join() of the same wrapper");
  }
  join_ = std::make_unique<Join>();
  join_->options = options;
  reducer_->on_begin([this] {
    const auto events = announce(kBackward);
    return BackwardRound{
        .divisor = divisor_of(num_active(events)),
        .source = lowest_active(events)};
  });
  const auto end_join = [this] {
    reducer_->on_begin(nullptr);
    join_.reset();
  };
  try {
    body();
    shadow_until_all_ended();
    broadcast_state(join_->last_source);
  } catch (...) {
    end_join();
    throw;
  }
  end_join();
}

// -------------------------------------------------------------------- module

DataParallelModule::DataParallelModule(
    torch::nn::Module& module, Group group,
    DistributedDataParallelOptions options)
    : module_(module), group_(std::move(group)), options_(std::move(options)) {
  check_positive("bucket_bytes", options_.bucket_bytes);
  check_positive("first_bucket_bytes", options_.first_bucket_bytes);
  check_positive("in_place_bytes", options_.in_place_bytes);
  if (group_.size() == 1) return;
  check_same_model(module_, options_, group_, device_of(module_));
  broadcast_state();
  std::vector<NamedParameter> parameters;
  for (const auto& parameter : unique_parameters(module_, options_)) {
    const bool trained = parameter.tensor.requires_grad();
    (trained ? parameters : frozen_).push_back(parameter);
  }
  if (parameters.empty() && !options_.may_be_frozen) {
    throw ConfigError(
        "[data parallel] no parameter of the model requires grad, so there is "
        "nothing to reduce; use the module without the wrapper");
  }
  if (options_.sync_batch_norm) {
    converted_ = convert_sync_batch_norm(module_, group_);
  }
  reducer_ = std::make_shared<GradientReducer>(
      std::move(parameters), group_, options_);
}

DataParallelModule::~DataParallelModule() = default;

const Group& DataParallelModule::group() const {
  return group_;
}

std::shared_ptr<void> DataParallelModule::no_sync() {
  if (!reducer_) return nullptr;
  const bool was_enabled = reducer_->enabled();
  reducer_->enable(false);
  return {nullptr, [reducer = reducer_, was_enabled](void*) {
            reducer->enable(was_enabled);
          }};
}

void DataParallelModule::begin_reduction() {
  if (reducer_) reducer_->begin_round();
}

void DataParallelModule::finish_reduction() {
  if (reducer_) reducer_->finish_round();
}

void DataParallelModule::sync_buffers() {
  if (!reducer_ || !options_.broadcast_buffers || !module_.is_training()) {
    return;
  }
  const auto buffers = buffers_of(module_);
  if (!buffers.empty()) broadcast_tensors(buffers, 0, group_, "buffers");
}

void DataParallelModule::broadcast_state(int source) {
  std::vector<Tensor> state;
  for (const auto& [_, tensor] : unique_parameters(module_, options_)) {
    state.push_back(tensor);
  }
  for (const auto& buffer : buffers_of(module_)) state.push_back(buffer);
  broadcast_tensors(state, source, group_, "model state");
}

Tensor
DataParallelModule::global_mean(const Tensor& loss_sum, int64_t local_count) {
  int64_t divisor = 1, count = local_count;
  if (reducer_) {
    const int64_t active = join_ ? num_active(announce(kCount)) : group_.size();
    divisor = divisor_of(active);
    count =
        sum_numbers({local_count}, group_, device_of(module_), "batch size")[0];
  }
  if (local_count < 0 || count < 1) {
    throw DataError(format(
        "[data parallel] global_mean: this rank has {} samples, all ranks "
        "together {}; at least one sample is needed",
        local_count, count));
  }
  // The reducer divides the sum of the gradients by `divisor`; the factor makes
  // a mean over all samples of it.
  return loss_sum * (static_cast<double>(divisor) / static_cast<double>(count));
}

std::vector<std::vector<std::string>> DataParallelModule::buckets() const {
  if (reducer_) return reducer_->buckets();
  return {};
}

void DataParallelModule::before_forward() {
  if (!reducer_) return;
  reducer_->before_forward();
  for (const auto& [name, tensor] : frozen_) {
    if (tensor.requires_grad()) {
      throw ConfigError(format(
          "[data parallel] \"{}\" was frozen when the wrapper was built and "
          "requires grad now, so its gradient would not be reduced; build a "
          "new wrapper after unfreezing",
          name));
    }
  }
  const bool reduces = torch::GradMode::is_enabled() && reducer_->enabled();
  if (!options_.broadcast_buffers || !module_.is_training() || !reduces) return;
  const auto buffers = buffers_of(module_);
  if (buffers.empty()) return;
  const int source = join_ ? lowest_active(announce(kBroadcastBuffers)) : 0;
  broadcast_tensors(buffers, source, group_, "buffers");
}

}  // namespace echelon
