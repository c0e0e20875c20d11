// A step is two graphs that share memory: forward and backward, and the update.
// What ranks tell each other in between is queued as ever, so that a rank which
// does not arrive is seen and named as in any step.
//
// A replay runs no code of the host, so the host's own state must be the same
// before and after it. The update of a sharded model ends with all-gathers that
// the next forward pass waits for. They are therefore the first thing in the
// graph of forward and backward: it begins with end_update(), as the step
// before it has left that out. leave() makes up for it when something else
// comes next.
//
// What changes from step to step comes in tensors that stay where they are: the
// batch, the flag that skips an update, the learning rate (optimizer.h).
#include "echelon/train/step_graphs.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/error.h"
#include "echelon/job/cuda_graphs.h"
#include "echelon/layers/layer_call.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

using torch::Tensor;

// Equal for batches that one graph can take.
std::vector<int64_t> key_of(Batch batch, bool count_units) {
  std::vector<int64_t> key{
      batch.global_count, count_units ? 1 : 0, batch.may_skip ? 1 : 0,
      static_cast<int64_t>(batch.more.size()),
      static_cast<int64_t>(batch.more_targets.size())};
  for_tensors(batch, [&](const Tensor& tensor) {
    key.push_back(static_cast<int64_t>(tensor.scalar_type()));
    key.push_back(tensor.dim());
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  });
  return key;
}

/// Why no step of any job can be captured on this rank; empty when some can.
std::string why_not_here(torch::Device device) {
  if (device.is_cpu()) return "ranks compute on CPUs, which have no graphs";
  for (const char* name :
       {"CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::string(value) != "0") {
      return format("{} is set, under which nothing can be captured", name);
    }
  }
  return "";
}

c10::DeviceAllocator& allocator_of(torch::Device device) {
  return *at::getDeviceAllocator(device.type());
}

bool captures_here(const Job& job, torch::Device device) {
  return captures_steps(job) && why_not_here(device).empty();
}

// A rank may have been started with other environment variables.
bool all_capture(const Job& job, World& world) {
  if (world.device().is_cpu()) return false;
  const bool here = captures_here(job, world.device());
  const auto ranks = world.exchange(here ? "captures" : "");
  return std::ranges::find(ranks, "") == ranks.end();
}

}  // namespace

StreamForGraphs::StreamForGraphs(const Job& job, const World& world)
    : device_(world.device()) {
  if (job.train.cuda_graphs == CudaGraphs::on) {
    if (const auto why = why_not_here(device_); !why.empty()) {
      throw ConfigError(format(
          "[train] cuda_graphs = \"on\": {}; set \"auto\", which then runs "
          "steps eagerly",
          why));
    }
  }
  if (!captures_here(job, device_)) return;
  const c10::impl::VirtualGuardImpl devices(device_.type());
  const c10::Stream outer = devices.getStream(device_);
  guard_.emplace(devices.getStreamFromGlobalPool(device_));
  wait_for(outer);
}

StreamForGraphs::~StreamForGraphs() {
  if (!guard_) return;
  const c10::Stream own = guard_->current_stream();
  guard_.reset();
  try {
    wait_for(own);
  } catch (const std::exception&) {
    // A device that has failed says so where its work is waited for.
  }
}

void StreamForGraphs::wait_for(c10::Stream stream) const {
  c10::Event given(device_.type());
  given.record(stream);
  given.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

struct StepGraphs::Captured {
  explicit Captured(torch::Device device)
      : forward_backward(device), update(device) {}

  Batch batch;  // on the device
  DeviceGraph forward_backward;
  Score score;
  DeviceGraph update;
  Tensor skip, numbers;  // numbers: undefined before the update is captured
};

StepGraphs::StepGraphs(
    const Job& job, World& world, TrainingState& state,
    timeline::Recorder& recorder,
    std::function<void(const std::string& line)> tell)
    : world_(world),
      device_(world.device()),
      state_(state),
      recorder_(recorder),
      tell_(std::move(tell)),
      choice_(job.train.cuda_graphs),
      captures_(all_capture(job, world)) {}

StepGraphs::~StepGraphs() = default;

Score StepGraphs::forward_backward(
    const Batch& batch, bool count_units, bool eager) {
  if (captures_ && batch.may_skip && world_.size() > 1) {
    stay_eager("ranks leave out samples, each its own number of them");
  }
  auto key = key_of(batch, count_units);
  const bool known = key == captured_key_;
  const bool ready = known || (key == key_ && in_a_row_ >= kFirst);
  in_graph_ = captures_ && !eager && ready &&
              ((captured_ && known) || make_room(known));
  between_halves_ = in_graph_;
  ++num_steps_;
  if (!in_graph_) {
    leave();
    in_a_row_ = key == key_ ? in_a_row_ + 1 : 1;
    key_ = std::move(key);
    // What the last of these steps leaves in the cache is what a step needs.
    if (captures_ && in_a_row_ == kFirst) allocator_of(device_).emptyCache();
    return state_.model().forward_backward(batch, count_units);
  }
  key_.clear();
  come_back();
  if (captured_ && known) {
    give(batch);
  } else {
    captured_key_ = std::move(key);
    capture(batch, count_units);
  }
  captured_->forward_backward.replay();
  update_is_open_ = false;
  return captured_->score;
}

// A graph cannot wait for what the model has begun outside of it, such as
// all-gathers after an update.
void StepGraphs::come_back() {
  if (std::exchange(has_left_, false)) state_.model().before_load();
}

void StepGraphs::give(const Batch& batch) {
  Batch from = batch;
  std::vector<Tensor> tensors;
  for_tensors(from, [&](const Tensor& one) { tensors.push_back(one); });
  auto next = tensors.begin();
  for_tensors(captured_->batch, [&](const Tensor& to) {
    to.copy_(*next++, /*non_blocking=*/true);
  });
}

void StepGraphs::capture(const Batch& batch, bool count_units) {
  ++num_captures_;
  tell_if_often();
  captured_ = std::make_unique<Captured>(device_);
  captured_->batch = batch;
  for_tensors(captured_->batch, [&](Tensor& one) {
    one = torch::empty_like(one, one.options().device(device_));
  });
  captured_->skip =
      torch::zeros({}, torch::dtype(torch::kFloat32).device(device_));
  give(batch);
  while_capturing([&] {
    captured_->forward_backward.begin();
    state_.end_update();
    captured_->score =
        state_.model().forward_backward(captured_->batch, count_units);
    // Nobody may wait later for what was captured, such as parameters that were
    // gathered ahead and not used.
    state_.model().before_load();
    captured_->forward_backward.end();
  });
}

// Nothing is timed meanwhile: no device comes to what is captured. An error is
// told with its way out if it is one of capturing; those of CUDA say so.
void StepGraphs::while_capturing(const std::function<void()>& body) {
  recorder_.hold_parts(true);
  try {
    body();
  } catch (const std::exception& error) {
    recorder_.hold_parts(false);
    const std::string text = detail::first_line(error);
    if (text.find("captur") == std::string::npos) throw;
    throw ConfigError(format(
        "[train] cuda_graphs = \"{}\": this job's step cannot be captured: {}; "
        "set cuda_graphs = \"off\"",
        to_string(choice_), text));
  }
  recorder_.hold_parts(false);
}

torch::Tensor StepGraphs::update(
    int64_t step, bool measure_norms, const std::vector<std::string>* layers,
    const torch::Tensor& skip) {
  if (!in_graph_) {
    return state_.update_on_device(
        step, measure_norms, &recorder_, measure_norms ? layers : nullptr,
        skip);
  }
  come_back();
  state_.begin_update(step);
  captured_->skip.copy_(skip, /*non_blocking=*/true);
  if (!captured_->numbers.defined()) {
    while_capturing([&] {
      captured_->update.begin(&captured_->forward_backward);
      captured_->numbers = state_.update_parameters(
          /*measure_norm=*/true, &recorder_, layers, captured_->skip);
      captured_->update.end();
    });
  }
  captured_->update.replay();
  between_halves_ = false;
  update_is_open_ = true;
  return captured_->numbers;
}

void StepGraphs::leave() {
  has_left_ = true;
  if (std::exchange(update_is_open_, false)) state_.end_update();
  // The second half needs the gradients in the graph's memory.
  if (gave_memory_back_ && !between_halves_) drop();
}

void StepGraphs::drop() {
  if (!captured_) return;
  captured_.reset();
  // Eager steps take memory of their own.
  if (std::exchange(gave_memory_back_, false)) {
    allocator_of(device_).emptyCache();
  }
}

// An eager step leaves its memory in the allocator's cache, and a graph takes
// as much again. Where the device has not that much, the cache is given back,
// and the graph is dropped before the next eager step. Returns false, and
// captures nothing any more, where even that is not enough. All ranks do what
// the fullest has to do.
//
//   known  the graph is one that was dropped
bool StepGraphs::make_room(bool known) {
  leave();
  drop();
  if (!known) {
    const auto stats = allocator_of(device_).getDeviceStats(device_.index());
    graph_bytes_ =
        stats.reserved_bytes[0].current - stats.allocated_bytes[0].current;
  }
  const auto lacking = [&] {
    const auto free =
        allocator_of(device_).getMemoryInfo(device_.index()).first;
    return std::max<int64_t>(graph_bytes_ - static_cast<int64_t>(free), 0);
  };
  const auto most = [&](int64_t bytes) {
    const Tensor all =
        torch::full({}, bytes, torch::dtype(torch::kInt64).device(device_));
    world_.group().all_reduce(all, ReduceOp::max).wait();
    return all.item<int64_t>();
  };
  if (most(lacking()) == 0) return true;
  allocator_of(device_).emptyCache();
  const int64_t lacks = most(lacking());
  gave_memory_back_ = lacks == 0;
  if (gave_memory_back_) return true;
  stay_eager(format(
      "a graph needs about {}, and the fullest GPU lacks {} of that",
      format_bytes(graph_bytes_), format_bytes(lacks)));
  return false;
}

void StepGraphs::stay_eager(const std::string& why) {
  captures_ = false;
  tell_(format("warning: [train] cuda_graphs: steps stay eager: {}", why));
}

void StepGraphs::tell_if_often() {
  constexpr int64_t kSome = 10;
  constexpr int64_t kOneIn = 20;
  if (told_ || num_captures_ < kSome || num_captures_ * kOneIn < num_steps_) {
    return;
  }
  told_ = true;
  tell_(format(
      "warning: [train] cuda_graphs: {} of {} steps were captured anew, which "
      "takes longer than an eager step. Batches had different shapes, or "
      "memory was short; set cuda_graphs = \"off\"",
      num_captures_, num_steps_));
}

}  // namespace echelon
