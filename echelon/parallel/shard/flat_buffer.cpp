#include "echelon/parallel/shard/flat_buffer.h"

#include <torch/optim.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "echelon/error.h"
#include "echelon/profiling/memory_meter.h"

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

// A leaf for the optimizer.
Tensor leaf(const Tensor& view) {
  return view.detach().set_requires_grad(true);
}

}  // namespace

FlatBuffer::FlatBuffer(
    Surroundings& surroundings, std::string name, const Named& parameters,
    bool equal)
    : around_(surroundings), name_(std::move(name)) {
  const torch::NoGradGuard no_grad;
  const Tensor& first = parameters.front().second;
  trainable_ = first.requires_grad();
  device_ = first.device();
  dtype_ = first.scalar_type();
  compute_ = around_.options.compute.value_or(dtype_);
  place(parameters);

  const int64_t numel = slot_ * around_.shard.size();
  whole_ = PooledTensor(numel, compute_, device_);
  own_whole_ = whole_.tensor().narrow(0, begin_, slot_);
  whole_.attach(around_.pool, MemoryKind::gathered);
  Tensor flat = whole_.tensor();
  if (compute_ != dtype_) {
    flat = torch::empty(
        {numel}, torch::TensorOptions().dtype(dtype_).device(device_));
  }
  fill(flat, equal);
  make_master(flat);
  if (compute_ != dtype_) whole_.tensor().copy_(flat);
  gather_ = Gather::done;
  if (!around_.keeps_whole()) release();

  for (auto& parameter : parameters_) {
    parameter.tensor.set_data(whole_.tensor()
                                  .narrow(0, parameter.begin, parameter.numel)
                                  .view(parameter.shape));
  }
  if (!trainable_) return;
  whole_gradient_ =
      PooledTensor(numel, around_.options.reduce.value_or(compute_), device_);
  own_gradient_ = whole_gradient_.tensor().narrow(0, begin_, slot_);
  for (auto& parameter : parameters_) {
    parameter.gradient = whole_gradient_.tensor()
                             .narrow(0, parameter.begin, parameter.numel)
                             .view(parameter.shape);
  }
}

// Where each parameter lies, and this rank's range.
void FlatBuffer::place(const Named& parameters) {
  for (const bool decaying : {true, false}) {
    for (const auto& [name, tensor] : parameters) {
      if (decays(tensor) != decaying) continue;
      parameters_.push_back(
          {.name = name,
           .tensor = tensor,
           .shape = tensor.sizes().vec(),
           .numel = tensor.numel()});
    }
  }
  int64_t end = 0;
  for (auto& parameter : parameters_) {
    parameter.begin = round_up(end, kAlignment);
    if (parameter.begin > end) gaps_.push_back({end, parameter.begin});
    end = parameter.begin + parameter.numel;
    if (decays(parameter.tensor)) decay_end_ = end;
  }
  const int64_t size = around_.shard.size();
  slot_ =
      std::max(round_up(round_up(end, size) / size, kAlignment), kAlignment);
  begin_ = slot_ * around_.shard.rank();
  if (slot_ * size > end) gaps_.push_back({end, slot_ * size});
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
  around_.shard.broadcast(flat, 0, call);
  around_.replicate.broadcast(flat, 0, call);
}

Tensor FlatBuffer::on_host(torch::ScalarType dtype) const {
  const auto options =
      torch::TensorOptions().dtype(dtype).pinned_memory(!device_.is_cpu());
  try {
    return torch::empty({slot_}, options);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw Error(
        "[memory] offload: " + std::to_string(bytes_of(slot_, dtype)) +
        " bytes of the host's memory for the part of \"" + name_ +
        "\" that is on this rank are not there (" +
        text.substr(0, text.find('\n')) +
        "); more ranks in dp_shard make the part smaller, offload = \"none\" "
        "keeps it on the device");
  }
}

void FlatBuffer::make_master(const Tensor& flat) {
  const MemoryKindScope kind(MemoryKind::parameters);
  const Tensor own = flat.narrow(0, begin_, slot_);
  if (around_.offloads()) {
    master_ = on_host(dtype_);
    master_.copy_(own);
    if (!around_.keeps_whole() && !around_.options.offload_shards) {
      low_ = own.to(compute_, /*non_blocking=*/false, /*copy=*/true);
    }
  } else if (around_.keeps_whole() && compute_ == dtype_) {
    shares_memory_ = true;
    master_ = own_whole_;
    set_memory_kind(whole_.tensor(), MemoryKind::parameters);
  } else {
    master_ = own.clone();
  }
  const auto decaying = own_range(0, decay_end_);
  const auto plain = own_range(decay_end_, slot_ * around_.shard.size());
  if (!trainable_) return;
  if (decaying.size() > 0) {
    decaying_ = leaf(master_.narrow(0, decaying.begin, decaying.size()));
  }
  if (plain.size() > 0) {
    plain_ = leaf(master_.narrow(0, plain.begin, plain.size()));
  }
}

// The part of [begin, end) that is this rank's, in its own count.
IndexRange FlatBuffer::own_range(int64_t begin, int64_t end) const {
  const int64_t from = std::clamp(begin, begin_, begin_ + slot_);
  const int64_t to = std::clamp(end, from, begin_ + slot_);
  return {from - begin_, to - begin_};
}

int64_t FlatBuffer::gathered_bytes() const {
  return bytes_of(whole_.tensor().numel(), compute_);
}

ShardedUnits::UnitBytes FlatBuffer::bytes() const {
  return {
      .name = name_,
      .shard = bytes_of(slot_, dtype_),
      .gathered = gathered_bytes(),
      .gradient = trainable_ ? bytes_of(
                                   whole_gradient_.tensor().numel(),
                                   whole_gradient_.tensor().scalar_type())
                             : 0};
}

// ----------------------------------------------------------------- parameters

void FlatBuffer::start_gather() {
  if (gather_ != Gather::none) return;
  const torch::NoGradGuard no_grad;
  gather_ = Gather::running;
  whole_.attach(around_.pool, MemoryKind::gathered);
  const CopyStream::Scope beside(around_.copies);
  if (!shares_memory_) {
    own_whole_.copy_(low_.defined() ? low_ : master_, /*non_blocking=*/true);
  }
  copied_ = around_.copies.mark();
  if (around_.shard.size() == 1) return;
  gathering_ = around_.shard.all_gather(
      whole_.tensor(), own_whole_, {.label = "gather " + name_, .async = true});
}

void FlatBuffer::finish_gather() {
  if (gather_ != Gather::running) return;
  gathering_.wait();
  gathering_ = {};
  copied_.wait();
  gather_ = Gather::done;
}

void FlatBuffer::release() {
  finish_gather();
  gather_ = Gather::none;
  if (!around_.keeps_whole()) whole_.detach(around_.pool);
}

void FlatBuffer::after_update() {
  if (trainable_) {
    after_load();
  } else if (!around_.keeps_whole()) {
    release();
  }
}

void FlatBuffer::after_load() {
  release();
  if (low_.defined()) low_.copy_(master_, /*non_blocking=*/true);
}

// ------------------------------------------------------------------ gradients

// With one rank and nothing to convert the whole gradient is the shard's.
bool FlatBuffer::gradient_is_whole() const {
  return around_.shard.size() == 1 && !around_.offloads() &&
         own_gradient_.scalar_type() == dtype_;
}

void FlatBuffer::add_gradient(size_t index, const Tensor& gradient) {
  whole_gradient_.attach(around_.pool, MemoryKind::gradients);
  auto& parameter = parameters_[index];
  if (parameter.written) {
    parameter.gradient.add_(gradient);
  } else {
    parameter.gradient.copy_(gradient);
    parameter.written = true;
  }
}

// Zeros where no gradient came.
void FlatBuffer::fill_gaps() {
  whole_gradient_.attach(around_.pool, MemoryKind::gradients);
  const Tensor& whole = whole_gradient_.tensor();
  for (auto& parameter : parameters_) {
    if (parameter.written) continue;
    parameter.gradient.zero_();
    parameter.written = true;
  }
  for (const auto& gap : gaps_) whole.narrow(0, gap.begin, gap.size()).zero_();
}

void FlatBuffer::show_gradients(bool show) {
  if (show) fill_gaps();
  for (auto& parameter : parameters_) {
    Tensor& shown = parameter.tensor.mutable_grad();
    if (show) {
      shown = parameter.gradient;
      continue;
    }
    if (shown.defined() && !shown.is_alias_of(parameter.gradient)) {
      parameter.gradient.copy_(shown);
    }
    shown.reset();
  }
}

void FlatBuffer::start_reduce() {
  fill_gaps();
  const Call call{.label = "reduce " + name_, .async = true};
  const Tensor& whole = whole_gradient_.tensor();
  if (around_.shard.size() == 1) {
    reducing_ = whole;
    reduction_ = around_.replicate.all_reduce(whole, ReduceOp::avg, call);
    reduce_ = Reduce::replicate;
    return;
  }
  const bool in_place =
      !has_gradient_ && !around_.offloads() && whole.scalar_type() == dtype_;
  if (in_place) {
    const MemoryKindScope kind(MemoryKind::gradients);
    if (!gradient_.defined()) gradient_ = torch::empty_like(master_);
    reducing_ = gradient_;
  } else if (around_.replicate.size() == 1) {
    reducing_ = own_gradient_;
  } else {
    if (!partial_.tensor().defined()) {
      partial_ = PooledTensor(slot_, whole.scalar_type(), device_);
    }
    partial_.attach(around_.pool, MemoryKind::gradients);
    reducing_ = partial_.tensor();
  }
  reduction_ =
      around_.shard.reduce_scatter(reducing_, whole, ReduceOp::avg, call);
  reduce_ = Reduce::scatter;
}

bool FlatBuffer::advance_reduce() {
  if (reduce_ == Reduce::none) return true;
  if (reduce_ == Reduce::copy) {
    arrived_.wait();
    end_reduce();
    return true;
  }
  reduction_.wait();
  reduction_ = {};
  if (reduce_ == Reduce::scatter && around_.replicate.size() > 1) {
    whole_gradient_.detach(around_.pool);
    reduction_ = around_.replicate.all_reduce(
        reducing_, ReduceOp::avg,
        {.label = "replicate " + name_, .async = true});
    reduce_ = Reduce::replicate;
    return false;
  }
  store(reducing_);
  if (around_.offloads() && !device_.is_cpu()) {
    reduce_ = Reduce::copy;  // which reads the buffer
    return false;
  }
  end_reduce();
  return true;
}

void FlatBuffer::end_reduce() {
  reduce_ = Reduce::none;
  reducing_.reset();
  if (partial_.attached()) partial_.detach(around_.pool);
  if (gradient_is_whole()) return;
  whole_gradient_.detach(around_.pool);
  for (auto& parameter : parameters_) parameter.written = false;
}

// Adds the mean of one reduction to this step's gradient.
void FlatBuffer::store(const Tensor& reduced) {
  const MemoryKindScope kind(MemoryKind::gradients);
  const bool first = !std::exchange(has_gradient_, true);
  if (around_.offloads()) {
    store_on_host(reduced, first);
  } else if (gradient_is_whole()) {
    gradient_ = reduced;
  } else if (!gradient_.defined() || !reduced.is_same(gradient_)) {
    if (!gradient_.defined()) gradient_ = torch::empty_like(master_);
    first ? gradient_.copy_(reduced) : gradient_.add_(reduced);
  }
}

void FlatBuffer::store_on_host(const Tensor& reduced, bool first) {
  settle();
  if (!gradient_.defined()) gradient_ = on_host(dtype_);
  arriving_adds_ = !first;
  arriving_ = first ? gradient_ : on_host(reduced.scalar_type());
  const CopyStream::Scope beside(around_.copies);
  arriving_.copy_(reduced, /*non_blocking=*/true);
  arrived_ = around_.copies.mark();
}

// The copy to the host has ended.
void FlatBuffer::settle() {
  if (!arriving_.defined()) return;
  arrived_.synchronize();
  if (arriving_adds_) gradient_.add_(arriving_);
  arriving_.reset();
}

void FlatBuffer::finish_reduce() {
  settle();
  if (!has_gradient_) return;
  const auto show = [&](Tensor& shard, const IndexRange& range) {
    if (!shard.defined()) return;
    // No view for autograd: torch::optim's zero_grad() detaches it in place.
    shard.mutable_grad() =
        gradient_.narrow(0, range.begin, range.size()).variable_data();
  };
  show(decaying_, own_range(0, decay_end_));
  show(plain_, own_range(decay_end_, slot_ * around_.shard.size()));
}

void FlatBuffer::clear_gradients() {
  if (!trainable_) return;
  settle();
  has_gradient_ = false;
  for (Tensor* shard : {&decaying_, &plain_}) {
    if (shard->defined()) shard->mutable_grad().reset();
  }
  if (gradient_is_whole()) gradient_.reset();
  whole_gradient_.detach(around_.pool);
  for (auto& parameter : parameters_) parameter.written = false;
}

// ------------------------------------------------------------------- of a rank

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
      own_range(parameter.begin, parameter.begin + parameter.numel);
  ShardedPart part{.name = parameter.name, .shape = parameter.shape};
  const int64_t begin =
      std::max(begin_ + range.begin - parameter.begin, int64_t{0});
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
