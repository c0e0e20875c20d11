// In the first run each tensor that autograd would save gets a number and is
// released. When backward asks for one of them, the frame runs forward again
// and collects the saved tensors under the same numbers. The second run stops,
// by an exception, at the last tensor that is still wanted. Its graph is
// discarded: the nodes, with the numbers, are those of the first run.
#include "echelon/memory/recompute.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>

#include "echelon/error.h"
#include "echelon/layers/graph_node.h"
#include "echelon/memory/kept_results.h"
#include "echelon/memory/saved_tensors.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

thread_local int second_runs = 0;

// Ends the second run. It is no std::exception, so that forward does not catch
// it.
struct Stop {};

// The state that all frames of one layer share.
struct Layer {
  LayerForward forward;
  RecomputeOptions options;
  std::unordered_set<std::string> keep;
  // Whether forward changes its inputs in place, so that copies must be kept.
  // Known when it has run once.
  enum class Inputs { unknown, stay, change };
  std::atomic<Inputs> inputs = Inputs::unknown;
};

// The end of the second run's graph. Its inputs must not be leaves, which
// in-place operators refuse.
struct Border : torch::autograd::Node {
  torch::autograd::variable_list
  apply(torch::autograd::variable_list&&) override {
    return {};
  }
};

// The properties in which the saved tensors of both runs must agree.
struct Shape {
  explicit Shape(const Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        dtype(tensor.scalar_type()),
        device(tensor.device()) {}
  bool operator==(const Shape&) const = default;
  std::string text() const {
    return c10::str(
        c10::getDtypeNames(dtype).first, " ", at::IntArrayRef(sizes));
  }

  std::vector<int64_t> sizes;
  torch::Dtype dtype;
  torch::Device device;
};

// One call of a layer's forward.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(std::shared_ptr<Layer> layer, const std::vector<Tensor>& inputs)
      : layer_(std::move(layer)),
        autocast_cache_(at::autocast::is_autocast_cache_enabled()),
        generators_(detail::generators_of(inputs)) {
    for (const auto& generator : layer_->options.generators) {
      generators_.push_back(generator);
    }
  }

  std::vector<Tensor> first_run(const std::vector<Tensor>& inputs) {
    random_ = detail::RandomState(generators_);
    const auto versions = versions_of(inputs);
    const auto copies = copies_of(inputs);
    auto outputs = run_first(inputs);
    const bool stayed = versions_of(inputs) == versions;
    if (!stayed && copies.empty()) {
      fail("changes its input in place, which it did not do the first time");
    }
    if (layer_->inputs != Layer::Inputs::change) {
      layer_->inputs = stayed ? Layer::Inputs::stay : Layer::Inputs::change;
    }
    keep_inputs(
        inputs, layer_->inputs == Layer::Inputs::change ? copies : inputs);
    if (random_ == detail::RandomState(generators_)) random_ = {};
    results_.finish(slots_.size());
    if (slots_.empty()) free_inputs();
    complete_ = true;
    return outputs;
  }

 private:
  struct Input {
    std::function<Tensor()> saved;
    bool requires_grad;
  };
  struct Slot {
    Shape shape;
    Tensor value;  // from the second run
    bool wanted = true;
  };

  // Lives while a node may still ask for its tensor.
  class Claim {
   public:
    Claim(std::shared_ptr<Frame> frame, size_t slot)
        : frame_(std::move(frame)), slot_(slot) {}
    ~Claim() { frame_->release(slot_); }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    Tensor get() const { return frame_->get(slot_); }

   private:
    std::shared_ptr<Frame> frame_;
    size_t slot_;
  };

  // The hooks of the first run.
  struct Numbering : SavedTensorHooks {
    explicit Numbering(std::shared_ptr<Frame> frame)
        : frame(std::move(frame)) {}
    std::function<Tensor()> pack(const Tensor& tensor) override {
      const std::lock_guard lock(frame->mutex_);
      frame->slots_.push_back({Shape(tensor), {}});
      return [claim = std::make_shared<Claim>(
                  frame, frame->slots_.size() - 1)] { return claim->get(); };
    }
    std::shared_ptr<Frame> frame;
  };

  // The hooks of the second run.
  struct Collecting : SavedTensorHooks {
    explicit Collecting(Frame& frame) : frame(frame) {}
    std::function<Tensor()> pack(const Tensor& tensor) override {
      frame.collect(tensor);
      return [tensor] { return tensor; };
    }
    Frame& frame;
  };

  // Returns nothing when forward is known not to change its inputs.
  std::vector<Tensor> copies_of(const std::vector<Tensor>& inputs) const {
    if (layer_->inputs == Layer::Inputs::stay) return {};
    const torch::NoGradGuard no_grad;
    const SavedTensorScope none(nullptr);
    std::vector<Tensor> copies;
    for (const auto& input : inputs) copies.push_back(input.detach().clone());
    return copies;
  }

  void keep_inputs(
      const std::vector<Tensor>& inputs, const std::vector<Tensor>& values) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs_.push_back({save_tensor(values[i]), inputs[i].requires_grad()});
    }
  }

  static std::vector<int64_t> versions_of(const std::vector<Tensor>& inputs) {
    std::vector<int64_t> versions;
    for (const auto& input : inputs) versions.push_back(input._version());
    return versions;
  }

  std::vector<Tensor> run_first(const std::vector<Tensor>& inputs) {
    const SavedTensorScope scope(
        std::make_shared<Numbering>(shared_from_this()));
    if (layer_->keep.empty()) return layer_->forward(inputs);
    detail::ResultRecorder recorder(
        layer_->keep, results_, [this] { return slots_.size(); }, generators_);
    const profiling::OperatorScope operators(recorder);
    return layer_->forward(inputs);
  }

  Tensor get(size_t slot) {
    const std::lock_guard lock(mutex_);
    if (!complete_) {
      fail(
          "runs backward within its forward; recompute what is around it, or "
          "nothing");
    }
    if (!has_run_) run_again();
    return slots_[slot].value;
  }

  void release(size_t slot) {
    Tensor value;  // destroyed without the lock
    const std::lock_guard lock(mutex_);
    slots_[slot].wanted = false;
    value = std::move(slots_[slot].value);
  }

  void run_again() {
    end_ = 0;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].wanted) end_ = i + 1;
    }
    collected_ = 0;
    std::vector<Tensor> inputs;
    for (const auto& input : inputs_) {
      inputs.push_back(input.saved());
      if (!input.requires_grad) continue;
      inputs.back() = inputs.back().detach();
      torch::autograd::set_history(inputs.back(), make_node<Border>());
    }
    run_second(inputs);
    if (collected_ < end_) {
      fail(format(
          "saved {} tensors for backward the second time, and {} or more the "
          "first time",
          collected_, end_));
    }
    has_run_ = true;
    free_inputs();
  }

  // Runs forward as the first run was: with its thread state, random numbers,
  // autocast and outer hooks. `leave` restores the caller's, also when Stop
  // ends the run.
  void run_second(const std::vector<Tensor>& inputs) {
    const at::ThreadLocalStateGuard thread(thread_);
    const torch::AutoGradMode gradients(true);
    detail::RandomState random_now;
    if (!random_.empty()) random_now = detail::RandomState(generators_);
    // The cast cache of the second run is dropped when it ends.
    const bool cache = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
    at::autocast::increment_nesting();
    ++second_runs;
    const auto leave = c10::make_scope_exit([&] {
      --second_runs;
      random_now.restore();
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_cache_enabled(cache);
    });
    random_.restore();
    const SavedTensorState::Scope outer(hooks_);
    const SavedTensorScope collecting(std::make_shared<Collecting>(*this));
    detail::Replay replay(
        layer_->keep, results_, layer_->options.buffers, layer_->options.name);
    const profiling::OperatorScope operators(replay);
    try {
      layer_->forward(inputs);
    } catch (const Stop&) {
    }
  }

  void collect(const Tensor& tensor) {
    auto& slot = slots_[collected_];
    if (!(Shape(tensor) == slot.shape)) {
      fail(format(
          "saved {} as tensor number {} for backward the second time, and {} "
          "the first time",
          Shape(tensor).text(), collected_, slot.shape.text()));
    }
    if (slot.wanted) slot.value = tensor;
    if (++collected_ == end_) throw Stop();
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(format(
        "recompute of layer \"{}\": it {}; what a layer computes may depend on "
        "its inputs and parameters alone",
        layer_->options.name, what));
  }

  // Frees what only the second run needs.
  void free_inputs() {
    inputs_.clear();
    results_.clear();
    random_ = {};
  }

  // The first run records these.
  std::shared_ptr<Layer> layer_;
  std::vector<Input> inputs_;
  at::ThreadLocalState thread_;
  SavedTensorState hooks_;
  bool autocast_cache_;
  std::vector<at::Generator> generators_;
  detail::RandomState random_;  // before it; empty: it drew no numbers
  detail::KeptResults results_;
  bool complete_ = false;

  // Nodes of one graph may ask from several threads, and graphs that are
  // destroyed during the second run release their slots.
  std::recursive_mutex mutex_;
  std::vector<Slot> slots_;
  bool has_run_ = false;
  size_t end_ = 0;  // slots that the second run fills
  size_t collected_ = 0;
};

}  // namespace

const std::vector<std::string>& matmul_operators() {
  static const std::vector<std::string> names = {
      "aten::mm",
      "aten::addmm",
      "aten::mv",
      "aten::addmv",
      "aten::_addmm_activation",
      "aten::_scaled_mm",
      "aten::convolution",
      "aten::_scaled_dot_product_flash_attention",
      "aten::_scaled_dot_product_flash_attention_for_cpu",
      "aten::_scaled_dot_product_efficient_attention",
      "aten::_scaled_dot_product_cudnn_attention",
      "aten::_scaled_dot_product_fused_attention_overrideable",
      "echelon::context_attention",
      "echelon::column_linear",
      "echelon::row_linear",
      "echelon::vocab_embedding",
      "echelon::collective",
      "echelon::batch_statistics"};
  return names;
}

LayerForward recomputed(LayerForward forward, RecomputeOptions options) {
  auto layer = std::make_shared<Layer>();
  layer->forward = std::move(forward);
  layer->keep = {options.keep.begin(), options.keep.end()};
  layer->options = std::move(options);
  return [layer](const std::vector<Tensor>& inputs) {
    if (!torch::GradMode::is_enabled()) return layer->forward(inputs);
    return std::make_shared<Frame>(layer, inputs)->first_run(inputs);
  };
}

bool recomputing() {
  return second_runs > 0;
}

}  // namespace echelon
