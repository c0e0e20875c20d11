#include "echelon/parallel/data/gradient_reducer.h"

#include <torch/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using torch::Tensor;

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// The strides that a gradient of `parameter` has: those of the parameter when
// it is dense, else row-major (autograd keeps the same rule).
std::vector<int64_t> gradient_strides(const Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  const auto strides = c10::contiguous_strides(parameter.sizes());
  return {strides.begin(), strides.end()};
}

// Whether `gradient` can be reduced where it is. Autograd may leave two
// gradients in one memory (of x in x + y and of y), which would be summed
// twice.
bool reducible(const Tensor& gradient, const Tensor& parameter) {
  return gradient.dtype() == parameter.dtype() &&
         gradient.storage().use_count() == 1 &&
         gradient.is_non_overlapping_and_dense() &&
         gradient.strides() == at::IntArrayRef(gradient_strides(parameter));
}

// A tensor of its own in a part of `flat`. Not a view: detach_() works on it,
// which LibTorch's zero_grad(false) calls.
Tensor part_of(const Tensor& flat, const Tensor& parameter, int64_t offset) {
  return torch::empty({0}, flat.options())
      .set_(
          flat.storage(), offset, parameter.sizes(),
          gradient_strides(parameter));
}

// Whether `gradient` is that part, whatever tensor it is called by.
bool lies_in(const Tensor& part, const Tensor& gradient) {
  return gradient.defined() &&
         gradient.const_data_ptr() == part.const_data_ptr() &&
         gradient.dtype() == part.dtype() && gradient.sizes() == part.sizes() &&
         gradient.strides() == part.strides();
}

// Whether someone would miss the mean if the parameter's gradient were another
// tensor: who holds it or its memory, and a graph that it is part of.
bool seen_by_others(const Tensor& gradient) {
  return gradient.defined() &&
         (gradient.requires_grad() || gradient.use_count() > 1 ||
          gradient.storage().use_count() > 1);
}

// Copies into tensors of the same sizes, with as few operators as there can be.
void copy_all(const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
  if (to.empty()) return;
  if (!to[0].is_cpu()) {
    at::_foreach_copy_(to, from);
    return;
  }
  for (size_t i = 0; i < to.size(); ++i) {
    const bool plain = from[i].is_cpu() && to[i].dtype() == from[i].dtype() &&
                       to[i].strides() == from[i].strides() &&
                       !from[i].is_neg() && !from[i].is_conj() &&
                       to[i].numel() > 0;
    if (plain) {
      std::memcpy(to[i].data_ptr(), from[i].const_data_ptr(), bytes_of(to[i]));
    } else {
      to[i].copy_(from[i]);
    }
  }
}

std::string quoted(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) {
    text += (i ? ", \"" : "\"") + names[i] + "\"";
  }
  if (names.size() > kShown) {
    text += " and " + std::to_string(names.size() - kShown) + " more";
  }
  return text;
}

struct Parameter {
  std::string name;
  Tensor tensor;
  size_t bucket = 0;
  bool ready = false;  // its gradient of this backward is complete
};

struct Bucket {
  std::vector<size_t> members;  // indices of parameters
  bool in_place = false;        // one member, reduced where its gradient is;
                                // else gradients are parts of the flat buffer
  GradientBucket content;
  BucketCompletion completion;
  size_t pending = 0;  // members that are not ready
};

}  // namespace

struct GradientReducer::Impl : std::enable_shared_from_this<Impl> {
  Impl(Group group, BucketHook hook, ReducerOptions options)
      : group(std::move(group)), hook(std::move(hook)), options(options) {}

  // Called with `mutex` held.
  void cut(const std::vector<int64_t>& order);
  void allocate(Bucket& bucket);
  bool kept_by_others(const Bucket& bucket) const;
  void begin(int task);
  void abandon();
  void reset();
  void mark_ready(size_t index);
  void launch(Bucket& bucket);
  void launch_ready();
  void fill(Bucket& bucket);
  void complete(Bucket& bucket, const std::vector<int64_t>& used);
  void check_all_ready();
  std::vector<int64_t> count_used(bool contributes);
  void cut_in_ready_order(int source);
  Tensor small_tensor(const std::vector<int64_t>& values) const;

  void on_ready(size_t index);
  void on_output();
  void finish();

  const Group group;
  const BucketHook hook;
  const ReducerOptions options;
  std::function<BackwardRound()> begin_listener;

  std::mutex mutex;
  std::vector<Parameter> parameters;
  std::vector<Bucket> buckets;
  bool enabled = true;
  bool cut_anew = false;  // in the order of a backward
  bool running = false;
  bool by_caller = false;  // from begin_round() to finish_round()
  int task = -1;           // autograd's number of this backward
  BackwardRound round;
  size_t next = 0;  // first bucket that was not launched
  std::vector<int64_t> ready_order;
};

namespace {

// Tells the reducer of one parameter; an earlier hook of the parameter, of
// another wrapper, still runs.
class ReadyHook : public torch::autograd::PostAccumulateGradHook {
 public:
  ReadyHook(
      std::weak_ptr<GradientReducer::Impl> reducer, size_t index,
      std::unique_ptr<PostAccumulateGradHook> earlier)
      : reducer_(std::move(reducer)),
        index_(index),
        earlier_(std::move(earlier)) {}

  void operator()(const torch::autograd::Variable& variable) override {
    if (earlier_) (*earlier_)(variable);
    if (const auto reducer = reducer_.lock()) reducer->on_ready(index_);
  }

 private:
  std::weak_ptr<GradientReducer::Impl> reducer_;
  size_t index_;
  std::unique_ptr<PostAccumulateGradHook> earlier_;
};

}  // namespace

// ------------------------------------------------------------------ buckets

// Large gradients alone, small ones together by dtype and device; a bucket
// comes when its last member does.
void GradientReducer::Impl::cut(const std::vector<int64_t>& order) {
  struct Open {
    std::vector<size_t> members;
    int64_t bytes = 0;
    size_t last = 0;  // position of the last member
  };
  const int64_t alone = std::min(options.in_place_bytes, options.bucket_bytes);
  std::vector<std::pair<size_t, Bucket>> closed;  // position of the last member
  std::map<std::pair<at::ScalarType, std::string>, Open> open;
  const auto close = [&](Open& group, bool in_place) {
    Bucket bucket;
    bucket.members = std::move(group.members);
    bucket.in_place = in_place;
    closed.emplace_back(group.last, std::move(bucket));
    group = {};
  };
  for (size_t position = 0; position < order.size(); ++position) {
    const size_t index = order[position];
    const Tensor& tensor = parameters[index].tensor;
    if (bytes_of(tensor) >= alone) {
      Open single{.members = {index}, .last = position};
      close(single, true);
      continue;
    }
    auto& group = open[{tensor.scalar_type(), tensor.device().str()}];
    group.members.push_back(index);
    group.bytes += bytes_of(tensor);
    group.last = position;
    const int64_t limit =
        closed.empty() ? options.first_bucket_bytes : options.bucket_bytes;
    if (group.bytes >= limit) close(group, false);
  }
  for (auto& [key, group] : open) {
    if (!group.members.empty()) close(group, false);
  }
  std::stable_sort(closed.begin(), closed.end(), [](auto& a, auto& b) {
    return a.first < b.first;
  });

  buckets.clear();
  for (auto& [_, bucket] : closed) buckets.push_back(std::move(bucket));
  for (size_t i = 0; i < buckets.size(); ++i) {
    buckets[i].content.index = static_cast<int64_t>(i);
    buckets[i].content.last = i + 1 == buckets.size();
    buckets[i].content.label = "bucket " + std::to_string(i);
    for (const size_t index : buckets[i].members) {
      parameters[index].bucket = i;
      buckets[i].content.names.push_back(parameters[index].name);
    }
  }
  reset();
}

// The buffer that small gradients are parts of.
void GradientReducer::Impl::allocate(Bucket& bucket) {
  int64_t numel = 0;
  for (const size_t index : bucket.members) {
    numel += parameters[index].tensor.numel();
  }
  const Tensor& first = parameters[bucket.members[0]].tensor;
  auto& content = bucket.content;
  content.flat = torch::empty({numel}, first.options().requires_grad(false));
  content.gradients.clear();
  int64_t offset = 0;
  for (const size_t index : bucket.members) {
    const Tensor& tensor = parameters[index].tensor;
    content.gradients.push_back(part_of(content.flat, tensor, offset));
    offset += tensor.numel();
  }
}

// Whether someone beside the parameters holds a gradient of the last backward:
// its values are not to change then. (Where autograd has added to it, they
// have.)
bool GradientReducer::Impl::kept_by_others(const Bucket& bucket) const {
  const auto& content = bucket.content;
  size_t known = bucket.members.size() + 1;
  for (size_t i = 0; i < bucket.members.size(); ++i) {
    const Tensor& part = content.gradients[i];
    const Tensor& gradient = parameters[bucket.members[i]].tensor.grad();
    if (!lies_in(part, gradient)) {
      if (part.use_count() > 1) return true;
    } else if (!gradient.is_same(part)) {
      ++known;
    }
  }
  return content.flat.storage().use_count() > known;
}

void GradientReducer::Impl::fill(Bucket& bucket) {
  auto& content = bucket.content;
  if (!bucket.in_place) {
    if (!content.flat.defined() || kept_by_others(bucket)) allocate(bucket);
    std::vector<Tensor> to, from;
    for (size_t i = 0; i < bucket.members.size(); ++i) {
      const Tensor& gradient = parameters[bucket.members[i]].tensor.grad();
      if (!gradient.defined()) {
        content.gradients[i].zero_();
      } else if (!lies_in(content.gradients[i], gradient)) {
        to.push_back(content.gradients[i]);
        from.push_back(gradient);
      }
    }
    copy_all(to, from);
    return;
  }
  const Tensor& tensor = parameters[bucket.members[0]].tensor;
  Tensor gradient = tensor.grad();
  if (gradient.defined() && reducible(gradient, tensor)) {
    gradient = gradient.detach();
  } else {
    const Tensor zeros = torch::empty_strided(
                             tensor.sizes(), gradient_strides(tensor),
                             tensor.options().requires_grad(false))
                             .zero_();
    gradient = gradient.defined() ? zeros.copy_(gradient) : zeros;
  }
  content.gradients = {gradient};
  content.flat =
      gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset());
}

// Leaves the mean where the optimizer looks for it. `used`: on how many ranks
// each parameter had a gradient, empty when all had.
void GradientReducer::Impl::complete(
    Bucket& bucket, const std::vector<int64_t>& used) {
  if (bucket.completion) bucket.completion();
  bucket.completion = nullptr;
  auto& content = bucket.content;
  for (size_t i = 0; i < bucket.members.size(); ++i) {
    const size_t index = bucket.members[i];
    if (!used.empty() && used[index] == 0) continue;
    Tensor& gradient = parameters[index].tensor.mutable_grad();
    const Tensor& mean = content.gradients[i];
    const bool there = bucket.in_place
                           ? gradient.defined() && gradient.is_alias_of(mean)
                           : lies_in(mean, gradient);
    if (there) continue;
    if (!bucket.in_place && seen_by_others(gradient)) {
      gradient.detach().copy_(mean);
    } else {
      gradient = mean;
    }
  }
  if (bucket.in_place) {
    content.gradients.clear();
    content.flat.reset();
  }
}

// ----------------------------------------------------------------- backward

void GradientReducer::Impl::reset() {
  running = false;
  by_caller = false;
  task = -1;
  next = 0;
  ready_order.clear();
  for (auto& parameter : parameters) parameter.ready = false;
  for (auto& bucket : buckets) {
    bucket.pending = bucket.members.size();
    bucket.completion = nullptr;
  }
}

void GradientReducer::Impl::begin(int new_task) {
  round = begin_listener ? begin_listener()
                         : BackwardRound{.divisor = group.size()};
  running = true;
  task = new_task;
  if (by_caller) return;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->finish();
      });
}

// This backward, or the last one, ended by an exception. What it started is
// waited for: peers may read and write these gradients until then. The error
// itself is reported elsewhere.
void GradientReducer::Impl::abandon() {
  for (size_t i = 0; i < next; ++i) {
    try {
      if (buckets[i].completion) buckets[i].completion();
    } catch (const std::exception&) {
    }
  }
  reset();
}

void GradientReducer::Impl::on_output() {
  std::lock_guard lock(mutex);
  if (!enabled || by_caller) return;
  // autograd::grad and backward(inputs) reach no parameter, or few by choice.
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (selected != nullptr && !selected->empty()) return;
  const bool frozen = std::none_of(
      parameters.begin(), parameters.end(), [](const Parameter& parameter) {
        return parameter.tensor.requires_grad();
      });
  if (frozen) return;
  const int current = torch::autograd::get_current_graph_task_id();
  if (running && task != current) abandon();
  if (!running) begin(current);
}

void GradientReducer::Impl::on_ready(size_t index) {
  torch::NoGradGuard no_grad;
  std::lock_guard lock(mutex);
  if (!enabled && !by_caller) return;
  const int current = torch::autograd::get_current_graph_task_id();
  if (running && parameters[index].ready) {
    if (by_caller || task == current) {
      throw ConfigError(
          "[data parallel] the gradient of \"" + parameters[index].name +
          "\" was completed twice in one backward, so its bucket was already "
          "reduced; run each part of the model once per backward, or "
          "accumulate "
          "under no_sync()");
    }
    abandon();
  }
  if (!running) begin(current);
  mark_ready(index);
  launch_ready();
}

void GradientReducer::Impl::mark_ready(size_t index) {
  auto& parameter = parameters[index];
  if (parameter.tensor.grad().defined() &&
      parameter.tensor.grad().is_sparse()) {
    throw ConfigError(
        "[data parallel] the gradient of \"" + parameter.name +
        "\" is sparse; only dense gradients are reduced: build the embedding "
        "with sparse(false)");
  }
  parameter.ready = true;
  ready_order.push_back(static_cast<int64_t>(index));
  --buckets[parameter.bucket].pending;
}

void GradientReducer::Impl::launch(Bucket& bucket) {
  fill(bucket);
  bucket.content.divisor = round.divisor;
  bucket.completion = hook(bucket.content, group);
}

void GradientReducer::Impl::launch_ready() {
  while (next < buckets.size() && buckets[next].pending == 0) {
    launch(buckets[next++]);
  }
}

void GradientReducer::Impl::check_all_ready() {
  std::vector<std::string> missing;
  for (const auto& parameter : parameters) {
    if (!parameter.ready && parameter.tensor.requires_grad()) {
      missing.push_back(parameter.name);
    }
  }
  if (missing.empty() || options.find_unused_parameters) return;
  const size_t count = missing.size();
  throw ConfigError(
      "[data parallel] rank " + std::to_string(group.rank()) + ": " +
      std::to_string(count) + " of " + std::to_string(parameters.size()) +
      " parameters got no gradient: " + quoted(missing) +
      "; every parameter must take part in the loss on every rank: set "
      "find_unused_parameters, or freeze them with requires_grad_(false) "
      "before "
      "wrapping");
}

Tensor
GradientReducer::Impl::small_tensor(const std::vector<int64_t>& values) const {
  return torch::tensor(values, torch::kInt64).to(parameters[0].tensor.device());
}

// On how many ranks each parameter has a gradient; empty when it is not asked.
std::vector<int64_t> GradientReducer::Impl::count_used(bool contributes) {
  if (!options.find_unused_parameters) return {};
  std::vector<int64_t> used;
  for (const auto& parameter : parameters) {
    used.push_back(contributes && parameter.tensor.grad().defined());
  }
  Tensor counts = small_tensor(used);
  group.all_reduce(counts, ReduceOp::sum, {.label = "used parameters"}).wait();
  counts = counts.cpu();
  const auto* first = counts.const_data_ptr<int64_t>();
  return {first, first + counts.numel()};
}

void GradientReducer::Impl::finish() {
  torch::NoGradGuard no_grad;
  std::lock_guard lock(mutex);
  if (!running) return;
  try {
    check_all_ready();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].ready) mark_ready(i);
    }
    launch_ready();
    const auto used = count_used(true);
    for (auto& bucket : buckets) complete(bucket, used);
  } catch (...) {
    abandon();
    throw;
  }
  if (!cut_anew) {
    cut_in_ready_order(round.source);
  } else {
    reset();
  }
}

void GradientReducer::Impl::cut_in_ready_order(int source) {
  if (buckets.size() > 1) {
    std::vector<int64_t> order = ready_order;
    order.resize(parameters.size());  // a shadow has none: it only receives
    Tensor agreed = small_tensor(order);
    group.broadcast(agreed, source, {.label = "bucket order"}).wait();
    agreed = agreed.cpu();
    const auto* first = agreed.const_data_ptr<int64_t>();
    cut({first, first + agreed.numel()});
  }
  cut_anew = true;
  reset();
}

// ------------------------------------------------------------------- public

GradientReducer::GradientReducer(
    std::vector<NamedParameter> named, Group group, BucketHook hook,
    ReducerOptions options)
    : impl_(
          std::make_shared<Impl>(std::move(group), std::move(hook), options)) {
  for (auto& [name, tensor] : named) {
    impl_->parameters.push_back({std::move(name), std::move(tensor)});
  }
  // Until a backward has shown better: the reverse of the order of definition.
  std::vector<int64_t> order(impl_->parameters.size());
  std::iota(order.rbegin(), order.rend(), 0);
  impl_->cut(order);
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    const Tensor& tensor = impl_->parameters[i].tensor;
    auto earlier =
        std::move(torch::autograd::impl::post_acc_grad_hooks(tensor));
    torch::autograd::impl::set_post_acc_grad_hooks(
        tensor, std::make_unique<ReadyHook>(impl_, i, std::move(earlier)));
  }
}

GradientReducer::~GradientReducer() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->running) impl_->abandon();
}

void GradientReducer::enable(bool enabled) {
  std::lock_guard lock(impl_->mutex);
  impl_->enabled = enabled;
}

bool GradientReducer::enabled() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->enabled;
}

void GradientReducer::before_forward() {
  // Inside a backward this is a recomputation.
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  std::lock_guard lock(impl_->mutex);
  if (impl_->running && !impl_->by_caller) impl_->abandon();
}

void GradientReducer::begin_round() {
  std::lock_guard lock(impl_->mutex);
  if (impl_->running) impl_->abandon();
  impl_->by_caller = true;
  impl_->begin(-1);
}

void GradientReducer::finish_round() {
  impl_->finish();
}

void GradientReducer::watch(const Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return;
  output.register_hook([weak = std::weak_ptr(impl_)](const Tensor&) {
    if (const auto self = weak.lock()) self->on_output();
  });
}

void GradientReducer::on_begin(std::function<BackwardRound()> listener) {
  std::lock_guard lock(impl_->mutex);
  impl_->begin_listener = std::move(listener);
}

void GradientReducer::shadow(const BackwardRound& round) {
  torch::NoGradGuard no_grad;
  std::lock_guard lock(impl_->mutex);
  std::vector<GradientBucket> contents;
  std::vector<BucketCompletion> completions;
  contents.reserve(impl_->buckets.size());
  for (const auto& bucket : impl_->buckets) {
    Bucket zeros;
    zeros.members = bucket.members;
    zeros.content = bucket.content;
    impl_->allocate(zeros);
    zeros.content.flat.zero_();
    zeros.content.divisor = round.divisor;
    contents.push_back(std::move(zeros.content));
    completions.push_back(impl_->hook(contents.back(), impl_->group));
  }
  impl_->count_used(false);
  for (const auto& completion : completions) {
    if (completion) completion();
  }
  if (!impl_->cut_anew) impl_->cut_in_ready_order(round.source);
}

std::vector<std::vector<std::string>> GradientReducer::buckets() const {
  std::lock_guard lock(impl_->mutex);
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : impl_->buckets) {
    names.push_back(bucket.content.names);
  }
  return names;
}

}  // namespace echelon
