#include "echelon/parallel/placement/slice_spans.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <functional>
#include <utility>

namespace echelon::placement {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// Passes gradients on, and calls `seen` when all of them are there.
struct Passage : Node {
  explicit Passage(std::function<void()> seen) : seen(std::move(seen)) {}
  variable_list apply(variable_list&& gradients) override {
    seen();
    return std::move(gradients);
  }
  std::function<void()> seen;
};

// The tensors behind one Passage. Whether there was one to be tracked.
bool pass(Tensors& tensors, std::function<void()> seen) {
  Tensors tracked;
  for (const auto& tensor : tensors) {
    if (tensor.requires_grad()) tracked.push_back(tensor);
  }
  if (tracked.empty() || !torch::GradMode::is_enabled()) return false;
  const std::shared_ptr<Node> node(
      new Passage(std::move(seen)), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(tracked));
  for (auto& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, node);
  }
  return true;
}

}  // namespace

struct SliceSpans::Times {
  Recorder* recorder;
  std::string track;
  torch::Device device;
  bool has_entry = false;
  int64_t begin_ns = 0;

  // Work may be queued only: a border of the slice is where it is done.
  int64_t now() const {
    if (!device.is_cpu()) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      guard.synchronizeDevice(
          device.has_index() ? device.index() : guard.getDevice().index());
    }
    return steady_now_ns();
  }
  void record(const char* name, SpanKind kind) {
    recorder->add(
        {.track = track,
         .name = name,
         .kind = kind,
         .begin_ns = begin_ns,
         .end_ns = now()});
  }
};

SliceSpans::SliceSpans(
    Recorder* recorder, std::string track, torch::Device device)
    : times_(
          std::make_shared<Times>(Times{recorder, std::move(track), device})) {}

SliceSpans::~SliceSpans() = default;

Tensors SliceSpans::enter(const Tensors& inputs) {
  Tensors here = inputs;
  times_->has_entry = pass(here, [times = times_] {
    times->record("backward", SpanKind::backward);
  });
  times_->begin_ns = times_->now();
  return here;
}

Tensors SliceSpans::leave(const Tensors& outputs) {
  times_->record(
      "forward",
      torch::GradMode::is_enabled() ? SpanKind::forward : SpanKind::evaluation);
  Tensors there = outputs;
  pass(there, [times = times_] {
    times->begin_ns = times->now();
    if (times->has_entry) return;
    // Nothing is before this slice: its backward ends with the whole one.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [times] { times->record("backward", SpanKind::backward); });
  });
  return there;
}

}  // namespace echelon::placement
