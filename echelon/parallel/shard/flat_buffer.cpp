// The optimizer sees two leaves, the parts of this rank's shard with and
// without weight decay; the layers see views of the unsharded buffer. Two state
// machines connect them.
//
//   unshard   none -> running (all-gather) -> done -> none (reshard)
//   reduce    none -> scatter -> replicate -> copy -> none
//
// A reduction skips `scatter` on one shard rank, `replicate` on one replica,
// and `copy` (to the host) without offload or on a CPU. start_ begins a
// transition and never waits; finish_ and advance_ wait for the collective in
// progress. Where the dtypes agree and nothing is offloaded, the master copy is
// this rank's range of the unsharded buffer, and no copy is made.
#include "echelon/parallel/shard/flat_buffer.h"

#include <torch/optim.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/parameter_owner.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/text/format.h"

namespace echelon::sharding {
namespace {

using torch::Tensor;

int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

bool decays(const Tensor& parameter) {
  return parameter.dim() >= 2;
}

int64_t bytes_of(int64_t numel, torch::Dtype dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

bool are_same_values(const Tensor& a, const Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

// A leaf of autograd, for the optimizer.
Tensor leaf(const Tensor& view) {
  return view.detach().set_requires_grad(true);
}

}  // namespace

FlatBuffer::FlatBuffer(
    ShardContext& context, std::string name, const Named& parameters,
    bool equal)
    : context_(context), name_(std::move(name)) {
  const torch::NoGradGuard no_grad;
  const Tensor& first = parameters.front().second;
  trainable_ = first.requires_grad();
  device_ = first.device();
  dtype_ = first.scalar_type();
  compute_ = context_.options.compute.value_or(dtype_);
  lay_out(parameters);

  const int64_t numel = shard_numel_ * context_.shard.size();
  unsharded_ = PooledTensor(numel, compute_, device_);
  own_unsharded_ = unsharded_.tensor().narrow(0, shard_begin_, shard_numel_);
  unsharded_.attach(context_.pool, timeline::MemoryKind::unsharded);
  Tensor flat = unsharded_.tensor();
  if (compute_ != dtype_) {
    flat = torch::empty(
        {numel}, torch::TensorOptions().dtype(dtype_).device(device_));
  }
  fill(flat, equal);
  make_master(flat);
  if (compute_ != dtype_) unsharded_.tensor().copy_(flat);
  unshard_state_ = UnshardState::done;
  if (!context_.keeps_unsharded()) reshard();

  for (auto& parameter : parameters_) {
    parameter.tensor.set_data(unsharded_.tensor()
                                  .narrow(0, parameter.begin, parameter.numel)
                                  .view(parameter.shape));
  }
  if (!trainable_) return;
  unsharded_gradient_ =
      PooledTensor(numel, context_.options.reduce.value_or(compute_), device_);
  own_gradient_ =
      unsharded_gradient_.tensor().narrow(0, shard_begin_, shard_numel_);
  for (auto& parameter : parameters_) {
    parameter.gradient = unsharded_gradient_.tensor()
                             .narrow(0, parameter.begin, parameter.numel)
                             .view(parameter.shape);
  }
}

// Places each parameter, and this rank's shard.
void FlatBuffer::lay_out(const Named& parameters) {
  for (const bool decaying : {true, false}) {
    for (const auto& [name, tensor] : parameters) {
      if (decays(tensor) != decaying) continue;
      parameters_.push_back(
          {.name = name,
           .tensor = tensor,
           .shape = tensor.sizes().vec(),
           .numel = tensor.numel(),
           .room = tensor.numel()});
      if (tensor.dim() == 2 && context_.options.padded.contains(name)) {
        parameters_.back().room =
            round_up(tensor.size(0), kPaddedRows) * tensor.size(1);
      }
    }
  }
  int64_t end = 0;
  for (auto& parameter : parameters_) {
    parameter.begin = round_up(end, kAlignment);
    if (parameter.begin > end) gaps_.push_back({end, parameter.begin});
    end = parameter.begin + parameter.room;
    const int64_t zeros = parameter.begin + parameter.numel;
    if (end > zeros) gaps_.push_back({zeros, end});
    if (decays(parameter.tensor)) decay_end_ = end;
  }
  const int64_t size = context_.shard.size();
  shard_numel_ =
      std::max(round_up(round_up(end, size) / size, kAlignment), kAlignment);
  shard_begin_ = shard_numel_ * context_.shard.rank();
  if (shard_numel_ * size > end) gaps_.push_back({end, shard_numel_ * size});
}

void FlatBuffer::fill(const Tensor& flat, bool equal) {
  for (const auto& parameter : parameters_) {
    flat.narrow(0, parameter.begin, parameter.numel)
        .view(parameter.shape)
        .copy_(parameter.tensor);
  }
  for (const auto& gap : gaps_) flat.narrow(0, gap.begin, gap.size()).zero_();
  if (equal) return;
  const Call call{.label = "values of " + name_};
  context_.shard.broadcast(flat, 0, call);
  context_.replicate.broadcast(flat, 0, call);
}

Tensor FlatBuffer::empty_on_host(torch::ScalarType dtype) const {
  const auto options =
      torch::TensorOptions().dtype(dtype).pinned_memory(!device_.is_cpu());
  try {
    return torch::empty({shard_numel_}, options);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw Error(format(
        "[memory] offload: {} bytes of the host's memory for the part of "
        "\"{}\" that is on this rank are not there ({}); more ranks in "
        "dp_shard make the part smaller, offload = \"none\" keeps it on the "
        "device",
        bytes_of(shard_numel_, dtype), name_, text.substr(0, text.find('\n'))));
  }
}

void FlatBuffer::make_master(const Tensor& flat) {
  const profiling::MemoryKindScope kind(timeline::MemoryKind::parameters);
  const Tensor own = flat.narrow(0, shard_begin_, shard_numel_);
  if (context_.offloads()) {
    master_ = empty_on_host(dtype_);
    master_.copy_(own);
    if (!context_.keeps_unsharded() && !context_.options.offload_shards) {
      compute_shard_ = own.to(compute_, /*non_blocking=*/false, /*copy=*/true);
    }
  } else if (context_.keeps_unsharded() && compute_ == dtype_) {
    shares_memory_ = true;
    master_ = own_unsharded_;
    profiling::set_memory_kind(
        unsharded_.tensor(), timeline::MemoryKind::parameters);
  } else {
    master_ = own.clone();
  }
  if (!trainable_) return;
  const auto set_leaf = [&](Tensor& shard, const IndexRange& range) {
    if (range.size() == 0) return;
    shard = leaf(master_.narrow(0, range.begin, range.size()));
  };
  set_leaf(decaying_, decaying_range());
  set_leaf(plain_, plain_range());
}

// The elements [begin, end) that this rank's shard has, counted from its begin.
IndexRange FlatBuffer::local_range(int64_t begin, int64_t end) const {
  const int64_t from =
      std::clamp(begin, shard_begin_, shard_begin_ + shard_numel_);
  const int64_t to = std::clamp(end, from, shard_begin_ + shard_numel_);
  return {from - shard_begin_, to - shard_begin_};
}

int64_t FlatBuffer::unsharded_bytes() const {
  return bytes_of(unsharded_.tensor().numel(), compute_);
}

ShardedUnits::UnitBytes FlatBuffer::bytes() const {
  return {
      .name = name_,
      .shard = bytes_of(shard_numel_, dtype_),
      .unsharded = unsharded_bytes(),
      .gradient = trainable_ ? bytes_of(
                                   unsharded_gradient_.tensor().numel(),
                                   unsharded_gradient_.tensor().scalar_type())
                             : 0};
}

// ----------------------------------------------------------------- parameters

void FlatBuffer::start_unshard() {
  if (unshard_state_ != UnshardState::none) return;
  const torch::NoGradGuard no_grad;
  unshard_state_ = UnshardState::running;
  unsharded_.attach(context_.pool, timeline::MemoryKind::unsharded);
  const CopyStream::Scope scope(context_.copies);
  if (!shares_memory_) {
    own_unsharded_.copy_(
        compute_shard_.defined() ? compute_shard_ : master_,
        /*non_blocking=*/true);
  }
  copied_ = context_.copies.mark();
  if (context_.shard.size() == 1) return;
  unshard_work_ = context_.shard.all_gather(
      unsharded_.tensor(), own_unsharded_,
      {.label = "gather " + name_, .async = true});
}

// On the CPU, the collective keeps its tensors itself.
FlatBuffer::~FlatBuffer() {
  if (device_.is_cpu()) return;
  try {
    finish_unshard();
  } catch (const std::exception&) {
    // The job is failing, and its error is on its way.
  }
}

void FlatBuffer::finish_unshard() {
  if (unshard_state_ != UnshardState::running) return;
  unshard_work_.wait();
  unshard_work_ = {};
  copied_.wait();
  unshard_state_ = UnshardState::done;
}

void FlatBuffer::reshard() {
  finish_unshard();
  unshard_state_ = UnshardState::none;
  if (!context_.keeps_unsharded()) unsharded_.detach(context_.pool);
}

void FlatBuffer::after_update() {
  if (trainable_) {
    after_load();
  } else if (!context_.keeps_unsharded()) {
    reshard();
  }
}

void FlatBuffer::after_load() {
  reshard();
  if (compute_shard_.defined())
    compute_shard_.copy_(master_, /*non_blocking=*/true);
}

// ------------------------------------------------------------------ gradients

// With one rank and nothing to convert, the unsharded gradient is the shard's.
bool FlatBuffer::shares_gradient_memory() const {
  return context_.shard.size() == 1 && !context_.offloads() &&
         own_gradient_.scalar_type() == dtype_;
}

void FlatBuffer::add_gradient(size_t index, const Tensor& gradient) {
  unsharded_gradient_.attach(context_.pool, timeline::MemoryKind::gradients);
  auto& parameter = parameters_[index];
  parameter.given = false;
  if (parameter.has_gradient) {
    parameter.gradient.add_(gradient);
    return;
  }
  // A hook may have made another one of the gradient that was written there.
  if (!are_same_values(gradient, parameter.gradient)) {
    parameter.gradient.copy_(gradient);
  }
  parameter.has_gradient = true;
}

std::vector<FlatBuffer::Parameter*>
FlatBuffer::parameters_in(int64_t begin, int64_t end) {
  std::vector<Parameter*> found;
  auto next =
      std::ranges::lower_bound(parameters_, begin, {}, &Parameter::begin);
  for (; next != parameters_.end() && next->begin < end; ++next) {
    if (next->begin != begin) return {};
    begin += begin + next->numel < end && begin + next->room >= end
                 ? next->room
                 : next->numel;
    found.push_back(&*next);
  }
  if (begin != end) found.clear();
  return found;
}

Tensor FlatBuffer::gradient_memory(const Tensor& weight) {
  if (!trainable_ || !weight.is_contiguous() ||
      weight.scalar_type() != own_gradient_.scalar_type()) {
    return {};
  }
  const int64_t begin = weight.storage_offset();
  const auto parameters = parameters_in(begin, begin + weight.numel());
  const bool free = !parameters.empty() &&
                    std::ranges::all_of(parameters, [](const auto* one) {
                      return !one->has_gradient && !one->given && !one->shared;
                    });
  if (!free) return {};
  unsharded_gradient_.attach(context_.pool, timeline::MemoryKind::gradients);
  for (auto* one : parameters) one->given = true;
  return unsharded_gradient_.tensor()
      .narrow(0, begin, weight.numel())
      .view(weight.sizes());
}

Tensor FlatBuffer::with_zero_rows(const Tensor& matrix) const {
  const int64_t begin = matrix.storage_offset();
  const auto found =
      std::ranges::lower_bound(parameters_, begin, {}, &Parameter::begin);
  const bool is_padded = found != parameters_.end() && found->begin == begin &&
                         found->room > found->numel &&
                         matrix.sizes() == found->shape;
  if (!is_padded) return {};
  return unsharded_.tensor()
      .narrow(0, begin, found->room)
      .view({-1, matrix.size(1)});
}

void FlatBuffer::share(const Tensor& parameter) {
  const int64_t begin = parameter.storage_offset();
  for (auto* one : parameters_in(begin, begin + parameter.numel())) {
    one->shared = true;
  }
}

// Writes zeros where no gradient has arrived.
void FlatBuffer::zero_missing() {
  unsharded_gradient_.attach(context_.pool, timeline::MemoryKind::gradients);
  const Tensor& flat = unsharded_gradient_.tensor();
  for (auto& parameter : parameters_) {
    if (parameter.has_gradient) continue;
    parameter.gradient.zero_();
    parameter.has_gradient = true;
  }
  for (const auto& gap : gaps_) flat.narrow(0, gap.begin, gap.size()).zero_();
}

void FlatBuffer::expose_gradients(bool expose) {
  if (expose) zero_missing();
  for (auto& parameter : parameters_) {
    Tensor& grad = parameter.tensor.mutable_grad();
    if (expose) {
      grad = parameter.gradient;
      continue;
    }
    if (grad.defined() && !grad.is_alias_of(parameter.gradient)) {
      parameter.gradient.copy_(grad);
    }
    grad.reset();
  }
}

// Chooses where the reduce-scatter writes: into the step's gradient when it is
// the first there, else into this rank's range of the unsharded gradient, or,
// for replicas, into pooled memory, so that the unsharded gradient can be freed
// before the all-reduce.
void FlatBuffer::start_reduce() {
  zero_missing();
  const Call call{.label = "reduce " + name_, .async = true};
  const Tensor& flat = unsharded_gradient_.tensor();
  if (context_.shard.size() == 1) {
    reducing_ = flat;
    reduce_work_ = context_.replicate.all_reduce(flat, ReduceOp::avg, call);
    reduce_state_ = ReduceState::replicate;
    return;
  }
  const bool in_place =
      !has_gradient_ && !context_.offloads() && flat.scalar_type() == dtype_;
  if (in_place) {
    const profiling::MemoryKindScope kind(timeline::MemoryKind::gradients);
    if (!gradient_.defined()) gradient_ = torch::empty_like(master_);
    reducing_ = gradient_;
  } else if (context_.replicate.size() == 1) {
    reducing_ = own_gradient_;
  } else {
    if (!partial_.tensor().defined()) {
      partial_ = PooledTensor(shard_numel_, flat.scalar_type(), device_);
    }
    partial_.attach(context_.pool, timeline::MemoryKind::gradients);
    reducing_ = partial_.tensor();
  }
  reduce_work_ =
      context_.shard.reduce_scatter(reducing_, flat, ReduceOp::avg, call);
  reduce_state_ = ReduceState::scatter;
}

bool FlatBuffer::advance_reduce() {
  if (reduce_state_ == ReduceState::none) return true;
  if (reduce_state_ == ReduceState::copy) {
    host_copied_.wait();
    end_reduce();
    return true;
  }
  reduce_work_.wait();
  reduce_work_ = {};
  if (reduce_state_ == ReduceState::scatter && context_.replicate.size() > 1) {
    unsharded_gradient_.detach(context_.pool);
    reduce_work_ = context_.replicate.all_reduce(
        reducing_, ReduceOp::avg,
        {.label = "replicate " + name_, .async = true});
    reduce_state_ = ReduceState::replicate;
    return false;
  }
  store(reducing_);
  if (context_.offloads() && !device_.is_cpu()) {
    reduce_state_ = ReduceState::copy;  // the copy still reads the buffer
    return false;
  }
  end_reduce();
  return true;
}

void FlatBuffer::end_reduce() {
  reduce_state_ = ReduceState::none;
  reducing_.reset();
  if (partial_.attached()) partial_.detach(context_.pool);
  if (shares_gradient_memory()) return;
  unsharded_gradient_.detach(context_.pool);
  forget_gradients();
}

void FlatBuffer::forget_gradients() {
  for (auto& parameter : parameters_) {
    parameter.has_gradient = false;
    parameter.given = false;
  }
}

// Adds the mean of one reduction to this step's gradient.
void FlatBuffer::store(const Tensor& reduced) {
  const profiling::MemoryKindScope kind(timeline::MemoryKind::gradients);
  const bool first = !std::exchange(has_gradient_, true);
  if (context_.offloads()) {
    store_on_host(reduced, first);
  } else if (shares_gradient_memory()) {
    gradient_ = reduced;
  } else if (!gradient_.defined() || !reduced.is_same(gradient_)) {
    if (!gradient_.defined()) gradient_ = torch::empty_like(master_);
    first ? gradient_.copy_(reduced) : gradient_.add_(reduced);
  }
}

void FlatBuffer::store_on_host(const Tensor& reduced, bool first) {
  finish_host_copy();
  if (!gradient_.defined()) gradient_ = empty_on_host(dtype_);
  host_copy_adds_ = !first;
  host_copy_ = first ? gradient_ : empty_on_host(reduced.scalar_type());
  const CopyStream::Scope scope(context_.copies);
  host_copy_.copy_(reduced, /*non_blocking=*/true);
  host_copied_ = context_.copies.mark();
}

// Waits for the copy to the host, and adds it.
void FlatBuffer::finish_host_copy() {
  if (!host_copy_.defined()) return;
  host_copied_.synchronize();
  if (host_copy_adds_) gradient_.add_(host_copy_);
  host_copy_.reset();
}

void FlatBuffer::finish_reduce() {
  finish_host_copy();
  if (!has_gradient_) return;
  const auto set_grad = [&](Tensor& shard, const IndexRange& range) {
    if (!shard.defined()) return;
    // Autograd must not see a view: torch::optim's zero_grad() detaches it.
    shard.mutable_grad() =
        gradient_.narrow(0, range.begin, range.size()).variable_data();
  };
  set_grad(decaying_, decaying_range());
  set_grad(plain_, plain_range());
}

void FlatBuffer::clear_gradients() {
  if (!trainable_) return;
  finish_host_copy();
  has_gradient_ = false;
  for (Tensor* shard : {&decaying_, &plain_}) {
    if (shard->defined()) shard->mutable_grad().reset();
  }
  if (shares_gradient_memory()) gradient_.reset();
  unsharded_gradient_.detach(context_.pool);
  forget_gradients();
}

// ---------------------------------------------------------- shards of this
// rank

std::vector<ShardedUnits::FlatShard> FlatBuffer::shards() const {
  std::vector<ShardedUnits::FlatShard> shards;
  if (decaying_.defined()) {
    shards.push_back({name_ + "/decay", true, decaying_});
  }
  if (plain_.defined()) {
    shards.push_back({name_ + "/no_decay", false, plain_});
  }
  return shards;
}

ShardedPart FlatBuffer::part(size_t index) const {
  const auto& parameter = parameters_[index];
  const auto range =
      local_range(parameter.begin, parameter.begin + parameter.numel);
  ShardedPart part{.name = parameter.name, .shape = parameter.shape};
  const int64_t begin =
      std::max(shard_begin_ + range.begin - parameter.begin, int64_t{0});
  part.range = {
      range.size() > 0 ? begin : 0,
      range.size() > 0 ? begin + range.size() : 0};
  part.value = master_.narrow(0, range.begin, range.size());
  if (has_gradient_) {
    part.gradient = gradient_.narrow(0, range.begin, range.size());
  }
  return part;
}

}  // namespace echelon::sharding
