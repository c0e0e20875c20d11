// update_on_device() never waits for the device: the norm, the loss scale and
// the decision to skip are numbers in one tensor there, and the optimizer takes
// the decision as a tensor. read_update() takes the numbers once they are on
// the host, and update() is the one after the other.
#include "echelon/train/strategies/step.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <exception>
#include <map>
#include <string>
#include <utility>

#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/error.h"
#include "echelon/layers/host_copy.h"
#include "echelon/optim/clip.h"
#include "echelon/profiling/memory_meter.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"
#include "echelon/train/strategies/model_source.h"

namespace echelon {

LoaderOptions training_batches(
    const Job& job, const TrainingData& data, const MeshGroups& groups) {
  LoaderOptions options;
  options.samples = data.train_samples;
  options.global_batch = job.train.batch;
  options.rank = groups.data_index();
  options.num_ranks = groups.data_ranks();
  if (options.num_ranks > 1) options.rank_batch = job.train.rank_batch;
  options.seed = job.train.seed;
  options.shuffle = job.data.shuffle;
  options.drop_last = job.data.drop_last;
  options.workers = job.data.workers;
  options.prefetch = job.data.prefetch;
  options.sample_keys = draws_masks(job.model, data.train->spec());
  return options;
}

LoaderOptions held_out_batches(
    const Job& job, const TrainingData& data, const MeshGroups& groups) {
  LoaderOptions options = training_batches(job, data, groups);
  options.samples = data.holdout_samples;
  options.rank_batch.clear();
  options.shuffle = options.training = options.drop_last = false;
  return options;
}

namespace {

// Waits for all ranks before each throws what it has found: otherwise the end
// of the first one would be the error of those that still communicate.
void meet(const World& world) {
  try {
    world.group().barrier();
  } catch (const Error&) {
    // What was found is the error to be told.
  }
}

}  // namespace

std::optional<Batch>
next_batch(Loader& loader, const Dataset& data, const World* together) {
  const bool agree =
      data.is_stream() && together != nullptr && together->size() > 1;
  std::optional<Batch> batch;
  std::exception_ptr error;
  try {
    batch = loader.next();
  } catch (...) {
    if (!agree) throw;
    error = std::current_exception();
  }
  if (!agree) return batch;
  const Position position = loader.position();
  // 52 bits of it suffice to tell positions apart; a checksum has 128.
  const auto place = std::stoull(
      checksum(position.stream.data(), position.stream.size()).substr(0, 13),
      nullptr, 16);
  constexpr int64_t kFailed = -1;
  const auto mine = torch::tensor(
      {error ? kFailed : (batch ? batch->global_count : 0),
       static_cast<int64_t>(place)},
      torch::kInt64);
  const auto there = torch::empty(
      {together->size(), 2},
      torch::dtype(torch::kInt64).device(together->device()));
  together->group()
      .all_gather(
          there, mine.to(together->device()),
          {.label = "samples of the stream"})
      .wait();
  const auto seen = there.cpu();
  const auto numbers = seen.accessor<int64_t, 2>();
  const auto had = [](int64_t n) {
    return n == 0 ? std::string("has ended")
                  : format("has {} more", counted(n, "sample"));
  };
  std::string differs;
  for (int64_t rank = 0; rank < together->size() && differs.empty(); ++rank) {
    const int64_t samples = numbers[rank][0];
    if (samples == kFailed) {
      differs = format(
          "the data's stream failed on rank {}, whose error says why", rank);
    } else if (samples != numbers[0][0] && numbers[0][0] != kFailed) {
      differs = format(
          "epoch {}: the data's stream {} on rank {}, and {} on rank 0; every "
          "rank has to read the same samples. Let each open the same files",
          position.epoch, had(samples), rank, had(numbers[0][0]));
    } else if (numbers[rank][1] != numbers[0][1]) {
      differs = format(
          "epoch {}: after {} samples the data's stream is at another position "
          "on rank {} than on rank 0; every rank has to read the same samples "
          "in the same order",
          position.epoch, position.consumed, rank);
    }
  }
  if (differs.empty()) return batch;
  meet(*together);
  if (error) std::rethrow_exception(error);
  throw DataError(differs);
}

void check_same_data(const OwnParts& own, World& world) {
  if (!own.dataset) return;
  const auto describe = [](const Dataset& dataset) {
    const SampleSpec spec = dataset.spec();
    const std::string size =
        dataset.size() < 0 ? "a stream" : counted(dataset.size(), "sample");
    return format(
        "{} of {} with targets {}", size,
        safetensors::shape_string(spec.input_shape),
        safetensors::shape_string(spec.target_shape));
  };
  std::string mine = describe(*own.dataset);
  if (own.holdout) mine += " and, held out, " + describe(*own.holdout);
  const auto all = world.exchange(mine);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    meet(world);
    throw DataError(format(
        "the data set of rank {} has {}, that of rank 0 {}; every rank has to "
        "have the same samples",
        rank, all[rank], all[0]));
  }
}

int64_t total_steps(const TrainOptions& options, int64_t batches_per_epoch) {
  if (options.steps == 0 && batches_per_epoch == 0) {
    throw ConfigError(format(
        "[train] epochs={}: the data is a stream that does not know its size, "
        "so that the steps of an epoch cannot be counted; set steps",
        options.epochs));
  }
  return options.steps > 0 ? options.steps : options.epochs * batches_per_epoch;
}

namespace {

using torch::Tensor;

// The layer with the longest name that `name` begins with.
int64_t
layer_of(const std::map<std::string, int64_t>& index, const std::string& name) {
  for (size_t end = name.rfind('.'); end != std::string::npos && end > 0;
       end = name.rfind('.', end - 1)) {
    const auto found = index.find(name.substr(0, end));
    if (found != index.end()) return found->second;
  }
  throw InternalError(
      "parameter \"" + name + "\" belongs to no layer of the model's list");
}

}  // namespace

// They are the same in each step, and a CUDA graph cannot take them from the
// host.
Tensor LayerNorms::places(
    const detail::TensorKind& kind, const List& list, torch::Device device) {
  auto& [layers, there] = places_[kind];
  if (layers != list.layers || !there.defined()) {
    layers = list.layers;
    there = to_device(torch::tensor(layers, torch::kInt64), device);
  }
  return there;
}

Tensor LayerNorms::measure(
    const ParallelModel& model, const std::vector<std::string>& layers,
    torch::Device device) {
  const torch::NoGradGuard no_grad;
  std::map<std::string, int64_t> index;
  for (const auto& layer : layers) {
    index.emplace(layer, static_cast<int64_t>(index.size()));
  }
  const auto parts = model.parameters();
  const auto shared = model.partitioned_gradients();
  std::map<detail::TensorKind, List> lists;  // _foreach_norm takes one kind
  const auto add = [&](const Tensor& gradient, size_t part) {
    if (!gradient.defined() || gradient.numel() == 0) return;
    auto& list = lists[detail::kind_of(gradient)];
    list.gradients.push_back(gradient);
    list.layers.push_back(layer_of(index, parts[part].name));
  };
  if (shared) {
    for (size_t i = 0; i < shared->counted.size(); ++i) {
      add(shared->counted[i], shared->parts.at(i));
    }
  } else {
    for (size_t i = 0; i < parts.size(); ++i) add(parts[i].gradient, i);
  }
  auto sums = torch::zeros(
      {static_cast<int64_t>(layers.size())},
      torch::dtype(torch::kFloat64).device(device));
  for (const auto& [kind, list] : lists) {
    const auto norms = at::_foreach_norm(list.gradients, 2);
    const auto squares = at::stack(norms).to(torch::kFloat64).square_();
    sums.index_add_(
        0, places(kind, list, device),
        detail::moved(squares, device, torch::kFloat64));
  }
  if (shared && shared->sum) shared->sum(sums);
  return sums.sqrt_();
}

namespace {

// The numbers of an update; those of layers follow.
enum Number : int64_t { kSkipped, kNorm, kScale, kOverflows, kNumNumbers };

// Float64 numbers on a device. Those of a CPU are written directly: a step of a
// small model takes less time than some tens of operators.
class Numbers {
 public:
  Numbers(int64_t size, torch::Device device)
      : all_(torch::zeros(
            {size}, torch::dtype(torch::kFloat64).device(device))) {}

  const Tensor& all() const { return all_; }
  Tensor one(int64_t place) const { return all_[place]; }

  void set(int64_t place, const Tensor& value) {
    if (all_.is_cpu()) {
      data()[place] = value.item<double>();
    } else {
      one(place).copy_(value, /*non_blocking=*/true);
    }
  }
  // Sets it to 1 where `flag` is not 0.
  void raise(int64_t place, const Tensor& flag) {
    if (all_.is_cpu()) {
      if (flag.item<double>() != 0) data()[place] = 1;
    } else {
      one(place).copy_(at::maximum(
          one(place), flag.to(all_.device(), torch::kFloat64, true)));
    }
  }
  void raise_unless_finite(int64_t place, int64_t of) {
    if (all_.is_cpu()) {
      if (!std::isfinite(data()[of])) data()[place] = 1;
    } else {
      raise(place, at::isfinite(one(of)).logical_not_());
    }
  }

 private:
  double* data() const { return all_.data_ptr<double>(); }

  Tensor all_;
};

// Counts what `make` allocates as `kind`.
template <class Make>
auto of_kind(timeline::MemoryKind kind, const Make& make) {
  const profiling::MemoryKindScope scope(kind);
  return make();
}

// Names the gradients that autograd makes; a shard's gradient is named where it
// is made.
void name_whole_gradients(const ParallelModel& model) {
  std::vector<torch::Tensor> leaves;
  for (const auto& part : model.parameters()) {
    if (!part.range && part.value.is_leaf() && part.value.requires_grad()) {
      leaves.push_back(part.value);
    }
  }
  profiling::name_gradients(leaves);
}

}  // namespace

TrainingState::TrainingState(
    const Job& job, const ModelPlace& place, int64_t total_steps)
    : options_(job.optimizer),
      skips_(job.train.on_non_finite != OnNonFinite::stop),
      device_(place.world.device()),
      model_(of_kind(
          timeline::MemoryKind::parameters,
          [&] { return make_parallel_model(job, place); })),
      optimizer_(of_kind(
          timeline::MemoryKind::optimizer_state,
          [&] {
            return make_optimizer(
                job.optimizer, model_->optimizer_groups(job.optimizer.decay()));
          })),
      schedule_(job.optimizer, total_steps),
      scaler_(
          job.precision, job.precision.compute == ComputeDtype::fp16 &&
                             job.precision.loss_scale == 0) {
  name_whole_gradients(*model_);
  use_scale();
  if (!skips_) return;
  for (const auto& part : model_->buffers()) {
    buffers_.push_back(part.value.detach());
    buffers_before_.push_back(buffers_.back().clone());
  }
}

void TrainingState::before_forward() {
  if (buffers_.empty()) return;
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_before_[i].copy_(buffers_[i], /*non_blocking=*/true);
  }
}

void TrainingState::restore_buffers(const torch::Tensor& skipped) {
  if (skipped.is_cpu() && skipped.item<float>() == 0) return;
  const torch::Tensor is_skipped = skipped.ne(0);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    torch::Tensor& buffer = buffers_[i];
    const auto here = is_skipped.to(buffer.device(), /*non_blocking=*/true);
    buffer.copy_(at::where(here, buffers_before_[i], buffer));
  }
}

void TrainingState::use_scale() {
  if (scaler_.active()) model_->set_gradient_scale(scaler_.scale_on_device());
}

void TrainingState::load_loss_scale(const LossScaler::State& state) {
  scaler_.load_state(state);
  use_scale();
}

// Returns what the scaler does. Its first scale moves to the gradients' device.
torch::Tensor TrainingState::check_scaled(const torch::Tensor& skip) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : optimizer_->parameters()) {
    gradients.push_back(parameter.grad());
  }
  const auto shared = model_->partitioned_gradients();
  const auto numbers = scaler_.check_on_device(
      gradients, shared ? shared->sum : SumOverRanks(), skip);
  use_scale();
  return numbers;
}

// The norm of all gradients as backward left them.
torch::Tensor TrainingState::norm() {
  const auto shared = model_->partitioned_gradients();
  return gradient_norm_on_device(
      optimizer_->parameters(), shared ? &*shared : nullptr);
}

torch::Tensor TrainingState::update_on_device(
    int64_t step, bool measure_norm, timeline::Recorder* recorder,
    const std::vector<std::string>* layers, const torch::Tensor& skip) {
  begin_update(step);
  const auto numbers = update_parameters(measure_norm, recorder, layers, skip);
  // A GPU's decision is not known here: the step is treated as an update, in
  // which the optimizer has changed nothing.
  const bool known =
      numbers.is_cpu() && numbers.const_data_ptr<double>()[kSkipped] != 0;
  end_update(/*updated=*/!known);
  return numbers;
}

void TrainingState::begin_update(int64_t step) {
  const torch::NoGradGuard no_grad;
  optimizer_->set_learning_rate(
      options_.learning_rate * schedule_.factor(step));
}

torch::Tensor TrainingState::update_parameters(
    bool measure_norm, timeline::Recorder* recorder,
    const std::vector<std::string>* layers, const torch::Tensor& skip) {
  const torch::NoGradGuard no_grad;
  timeline::ScopedSpan span(
      recorder, "compute", "optimizer", timeline::SpanKind::optimizer);
  const auto num_layers = static_cast<int64_t>(layers ? layers->size() : 0);
  Numbers numbers(kNumNumbers + num_layers, device_);
  if (skip.defined()) numbers.raise(kSkipped, skip);
  // The gradients are only read until the optimizer multiplies them by this, to
  // unscale and to clip them. Norms and the clipping limit are of the unscaled
  // ones.
  torch::Tensor factor;
  const auto times_factor = [&](const torch::Tensor& norms) {
    if (!factor.defined()) return norms;
    return norms * detail::moved(factor, norms.device(), torch::kFloat64);
  };
  if (scaler_.active()) {
    const auto scaled = check_scaled(skip);
    numbers.raise(kSkipped, scaled[0]);
    numbers.set(kScale, scaled[1]);
    numbers.set(kOverflows, scaled[2]);
    factor = scaled[1].reciprocal();
  }
  if (layers) {
    numbers.all()
        .narrow(0, kNumNumbers, num_layers)
        .copy_(times_factor(layer_norms_.measure(*model_, *layers, device_)));
  }
  const bool measured = options_.clip_norm > 0 || measure_norm || skips_;
  if (measured) {
    const auto whole = times_factor(norm());
    numbers.set(kNorm, whole);
    numbers.raise_unless_finite(kSkipped, kNorm);
    if (options_.clip_norm > 0) {
      factor = times_factor(clip_factor(whole, options_.clip_norm));
    }
  }
  torch::Tensor skipped;
  if (measured || skip.defined() || scaler_.active()) {
    skipped = numbers.one(kSkipped).to(torch::kFloat32);
  }
  optimizer_->step(skipped, factor);
  optimizer_->zero_grad();  // these may be scaled and clipped, or not
  if (!buffers_.empty()) restore_buffers(skipped);
  return numbers.all();
}

StepUpdate TrainingState::read_update(const torch::Tensor& numbers) const {
  const auto* values = numbers.const_data_ptr<double>();
  StepUpdate update;
  update.updated = values[kSkipped] == 0;
  update.norm = values[kNorm];
  if (scaler_.active()) {
    update.loss_scale = values[kScale];
    scaler_.check(values[kScale], values[kOverflows]);
  }
  if (update.updated) {
    update.layer_norms.assign(values + kNumNumbers, values + numbers.numel());
  }
  return update;
}

StepUpdate TrainingState::update(
    int64_t step, bool measure_norm, timeline::Recorder* recorder,
    const std::vector<std::string>* layers) {
  return read_update(
      HostCopy({update_on_device(step, measure_norm, recorder, layers, {})})
          .wait()[0]);
}

}  // namespace echelon
