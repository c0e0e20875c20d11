// A reducer runs from the first output or gradient of a backward, or from
// begin_round(), until finish(). Buckets [0, next) are launched, always in the
// order of their numbers, so all ranks start the same collectives in the same
// order. A backward that an exception ends never reaches finish(); the next one
// finds `running` set and abandons it.
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
#include <span>
#include <utility>

#include "echelon/error.h"
#include "echelon/parallel/data/coalesced.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// The strides of a gradient of `parameter`, by autograd's rule: those of the
// parameter if it is dense, else row-major.
std::vector<int64_t> gradient_strides(const Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  const auto strides = c10::contiguous_strides(parameter.sizes());
  return {strides.begin(), strides.end()};
}

// Whether `gradient` can be reduced in place. It cannot if it shares memory:
// autograd may store two gradients in one place (for x and y in x + y), and
// that place would be summed twice.
bool reducible(const Tensor& gradient, const Tensor& parameter) {
  return gradient.dtype() == parameter.dtype() &&
         gradient.storage().use_count() == 1 &&
         gradient.is_non_overlapping_and_dense() &&
         gradient.strides() == at::IntArrayRef(gradient_strides(parameter));
}

// A tensor in the memory of `flat`, but not a view of it: LibTorch's
// zero_grad(false) calls detach_(), which views do not allow.
Tensor
slice_of_flat(const Tensor& flat, const Tensor& parameter, int64_t offset) {
  return torch::empty({0}, flat.options())
      .set_(
          flat.storage(), offset, parameter.sizes(),
          gradient_strides(parameter));
}

// Whether `gradient` is in the same memory as `slice` of the flat buffer.
bool is_in_place(const Tensor& slice, const Tensor& gradient) {
  return gradient.defined() &&
         gradient.const_data_ptr() == slice.const_data_ptr() &&
         gradient.dtype() == slice.dtype() &&
         gradient.sizes() == slice.sizes() &&
         gradient.strides() == slice.strides();
}

// Whether the gradient tensor must not be replaced: someone else holds it or
// its memory, or it is part of a graph.
bool seen_by_others(const Tensor& gradient) {
  return gradient.defined() &&
         (gradient.requires_grad() || gradient.use_count() > 1 ||
          gradient.storage().use_count() > 1);
}

// Copies to tensors of the same sizes, by as few operators as possible.
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
  if (names.size() <= kShown) return join(names, ", ", in_quotes);
  return format(
      "{} and {} more", join(std::span(names).first(kShown), ", ", in_quotes),
      names.size() - kShown);
}

}  // namespace

struct GradientReducer::Impl : std::enable_shared_from_this<Impl> {
  struct Parameter {
    std::string name;
    Tensor tensor;
    size_t bucket = 0;
    bool ready = false;  // its gradient of this backward is complete
  };

  struct Bucket {
    std::vector<size_t> members;  // indices of parameters
    // True: one member, whose gradient is reduced where it is. False: the
    // gradients are in the flat buffer.
    bool in_place = false;
    GradientBucket content;
    BucketCompletion completion;
    size_t pending = 0;  // members that are not ready
  };

  Impl(Group group, const DistributedDataParallelOptions& options)
      : group(std::move(group)),
        hook(options.hook ? options.hook : all_reduce_hook()),
        options(options) {}

  // Called with `mutex` held.
  void build_buckets(const std::vector<int64_t>& order);
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
  void rebuild_in_ready_order(int source);
  torch::Device device() const { return parameters[0].tensor.device(); }

  void on_ready(size_t index);
  void on_output();
  void finish();

  const Group group;
  const BucketHook hook;
  const DistributedDataParallelOptions options;
  std::function<BackwardRound()> begin_listener;

  std::mutex mutex;
  std::vector<Parameter> parameters;
  std::vector<Bucket> buckets;
  bool enabled = true;
  bool rebuilt = false;  // buckets are in the order of a backward
  bool running = false;
  bool by_caller = false;  // from begin_round() to finish_round()
  int task = -1;           // autograd's number of this backward
  BackwardRound round;
  size_t next = 0;  // first bucket that was not launched
  std::vector<int64_t> ready_order;
};

namespace {

// Tells the reducer that a gradient is complete. A hook that another wrapper
// put on the parameter still runs.
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

// Large gradients get a bucket each, small ones share buckets by dtype and
// device. Buckets are ordered by the position of their last member.
void GradientReducer::Impl::build_buckets(const std::vector<int64_t>& order) {
  struct Collected {
    Bucket bucket;
    int64_t bytes = 0;
    size_t last = 0;  // position of the last member
  };
  const int64_t alone = std::min(options.in_place_bytes, options.bucket_bytes);
  std::vector<Collected> closed;
  std::map<std::pair<at::ScalarType, std::string>, Collected> open;
  for (size_t position = 0; position < order.size(); ++position) {
    const size_t index = order[position];
    const Tensor& tensor = parameters[index].tensor;
    if (bytes_of(tensor) >= alone) {
      closed.push_back(
          {.bucket = {.members = {index}, .in_place = true}, .last = position});
      continue;
    }
    auto& group = open[{tensor.scalar_type(), tensor.device().str()}];
    group.bucket.members.push_back(index);
    group.bytes += bytes_of(tensor);
    group.last = position;
    // A small first bucket lets communication begin early.
    const int64_t limit =
        closed.empty() ? options.first_bucket_bytes : options.bucket_bytes;
    if (group.bytes >= limit) closed.push_back(std::exchange(group, {}));
  }
  for (auto& [_, group] : open) {
    if (!group.bucket.members.empty()) closed.push_back(std::move(group));
  }
  std::ranges::stable_sort(closed, {}, &Collected::last);

  buckets.clear();
  for (auto& group : closed) buckets.push_back(std::move(group.bucket));
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

// Allocates the buffer of the small gradients.
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
    content.gradients.push_back(slice_of_flat(content.flat, tensor, offset));
    offset += tensor.numel();
  }
}

// Whether someone other than the parameters holds a gradient of the last
// backward, whose values must not change then. (If autograd has added to it,
// they have changed already.)
bool GradientReducer::Impl::kept_by_others(const Bucket& bucket) const {
  const auto& content = bucket.content;
  size_t known = bucket.members.size() + 1;
  for (size_t i = 0; i < bucket.members.size(); ++i) {
    const Tensor& slice = content.gradients[i];
    const Tensor& gradient = parameters[bucket.members[i]].tensor.grad();
    if (!is_in_place(slice, gradient)) {
      if (slice.use_count() > 1) return true;
    } else if (!gradient.is_same(slice)) {
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
      } else if (!is_in_place(content.gradients[i], gradient)) {
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

// Moves the mean to the parameters' .grad. `used`: the number of ranks on which
// each parameter had a gradient; empty when all had.
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
                           : is_in_place(mean, gradient);
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

// Discards a backward that ended by an exception. Waits for the communication
// that it started, since peers may read and write these gradients until then.
// The error itself is reported elsewhere.
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
  // autograd::grad and backward(inputs) reach no parameter, or a few that the
  // caller chose.
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (selected != nullptr && !selected->empty()) return;
  const bool trains = std::ranges::any_of(
      parameters, [](const auto& one) { return one.tensor.requires_grad(); });
  if (!trains) return;
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
      throw ConfigError(format(
          "[data parallel] the gradient of \"{}\" was completed twice in one "
          "backward, so its bucket was already reduced; run each part of the "
          "model once per backward, or accumulate under no_sync()",
          parameters[index].name));
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
    throw ConfigError(format(
        "[data parallel] the gradient of \"{}\" is sparse; only dense "
        "gradients are reduced: build the embedding with sparse(false)",
        parameter.name));
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
  throw ConfigError(format(
      "[data parallel] rank {}: {} of {} parameters got no gradient: {}; every "
      "parameter must take part in the loss on every rank: set "
      "find_unused_parameters, or freeze them with requires_grad_(false) "
      "before wrapping",
      group.rank(), missing.size(), parameters.size(), quoted(missing)));
}

// The number of ranks on which each parameter has a gradient; empty unless
// unused parameters are allowed.
std::vector<int64_t> GradientReducer::Impl::count_used(bool contributes) {
  if (!options.find_unused_parameters || parameters.empty()) return {};
  std::vector<int64_t> used;
  for (const auto& parameter : parameters) {
    used.push_back(contributes && parameter.tensor.grad().defined());
  }
  return sum_numbers(used, group, device(), "used parameters");
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
  if (!rebuilt) rebuild_in_ready_order(round.source);
  reset();
}

void GradientReducer::Impl::rebuild_in_ready_order(int source) {
  if (buckets.size() > 1) {
    std::vector<int64_t> order = ready_order;
    order.resize(
        parameters.size());  // a shadow has no order, and only receives
    const Tensor agreed = torch::tensor(order, torch::kInt64).to(device());
    group.broadcast(agreed, source, {.label = "bucket order"}).wait();
    build_buckets(to_numbers(agreed));
  }
  rebuilt = true;
}

GradientReducer::GradientReducer(
    std::vector<NamedParameter> named, Group group,
    const DistributedDataParallelOptions& options)
    : impl_(std::make_shared<Impl>(std::move(group), options)) {
  for (auto& [name, tensor] : named) {
    impl_->parameters.push_back({std::move(name), std::move(tensor)});
  }
  // Until a backward has shown the order, it is the reverse of the order of
  // definition.
  std::vector<int64_t> order(impl_->parameters.size());
  std::iota(order.rbegin(), order.rend(), 0);
  impl_->build_buckets(order);
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    const Tensor& tensor = impl_->parameters[i].tensor;
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor);
    hook = std::make_unique<ReadyHook>(impl_, i, std::move(hook));
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
  // A forward inside a backward is a recomputation.
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
    Impl::Bucket zeros;
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
  if (!impl_->rebuilt) impl_->rebuild_in_ready_order(round.source);
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
