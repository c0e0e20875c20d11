// While forward runs, each tensor that autograd would save is given a number
// and let go. The first of them that backward asks for makes the frame run
// forward again, whose saves are collected under the same numbers; it stops, by
// an exception, at the last one that is still wanted. That graph is thrown
// away: the first one has the nodes, and the numbers.
#include "echelon/memory/recompute.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
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
#include "echelon/memory/kept_results.h"
#include "echelon/memory/random_state.h"
#include "echelon/memory/saved_tensors.h"

namespace echelon {
namespace {

using torch::Tensor;

thread_local int second_runs = 0;

// Ends the second run; forward must not take it for an error.
struct Stop {};

// What all frames of one layer have in common.
struct Layer {
  LayerForward forward;
  RecomputeOptions options;
  std::unordered_set<std::string> keep;
  /// Whether forward changes its inputs in place, so that copies must be kept.
  /// Known when it has run once.
  enum class Inputs { unknown, stay, change };
  std::atomic<Inputs> inputs = Inputs::unknown;
};

// Where the graph of the second run ends: its inputs are no leaves, which
// operators in place refuse.
struct Border : torch::autograd::Node {
  torch::autograd::variable_list
  apply(torch::autograd::variable_list&&) override {
    return {};
  }
};

// What the second run must save in place of the first one's.
struct Shape {
  explicit Shape(const Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        dtype(tensor.scalar_type()),
        device(tensor.device()) {}
  bool operator==(const Shape&) const = default;
  std::string text() const {
    std::string list;
    for (const int64_t size : sizes) {
      list += (list.empty() ? "" : ", ") + std::to_string(size);
    }
    return std::string(c10::getDtypeNames(dtype).first) + " [" + list + "]";
  }

  std::vector<int64_t> sizes;
  torch::Dtype dtype;
  torch::Device device;
};

// Casts of the second run are forgotten with it.
class AutocastRegion {
 public:
  explicit AutocastRegion(bool cache)
      : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  ~AutocastRegion() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_cache_enabled(before_);
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;

 private:
  bool before_;
};

// As the generators were, and afterwards as they are now.
class RandomAsBefore {
 public:
  RandomAsBefore(
      const detail::RandomState& state,
      const std::vector<at::Generator>& generators) {
    if (state.empty()) return;
    now_ = detail::RandomState(generators);
    state.restore();
  }
  ~RandomAsBefore() { now_.restore(); }
  RandomAsBefore(const RandomAsBefore&) = delete;
  RandomAsBefore& operator=(const RandomAsBefore&) = delete;

 private:
  detail::RandomState now_;
};

class SecondRun {
 public:
  SecondRun() { ++second_runs; }
  ~SecondRun() { --second_runs; }
  SecondRun(const SecondRun&) = delete;
  SecondRun& operator=(const SecondRun&) = delete;
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
    if (slots_.empty()) forget();
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
    Tensor value;  // of the second run
    bool wanted = true;
  };

  // Lives as long as a node may ask for its tensor.
  class Claim {
   public:
    Claim(std::shared_ptr<Frame> frame, size_t slot)
        : frame_(std::move(frame)), slot_(slot) {}
    ~Claim() { frame_->let_go(slot_); }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    Tensor get() const { return frame_->get(slot_); }

   private:
    std::shared_ptr<Frame> frame_;
    size_t slot_;
  };

  // Hooks of the first run.
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

  // Hooks of the second run.
  struct Collecting : SavedTensorHooks {
    explicit Collecting(Frame& frame) : frame(frame) {}
    std::function<Tensor()> pack(const Tensor& tensor) override {
      frame.collect(tensor);
      return [tensor] { return tensor; };
    }
    Frame& frame;
  };

  // Empty when it is known that forward leaves them as they are.
  std::vector<Tensor> copies_of(const std::vector<Tensor>& inputs) const {
    if (layer_->inputs == Layer::Inputs::stay) return {};
    const torch::NoGradGuard no_grad;
    const SavedTensorScope none(nullptr);
    std::vector<Tensor> copies;
    for (const auto& input : inputs) copies.push_back(input.detach().clone());
    return copies;
  }

  // After the first run, when it is known which.
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
    detail::Keeper keeper(
        layer_->keep, results_, [this] { return slots_.size(); }, generators_);
    const OperatorScope operators(keeper);
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

  void let_go(size_t slot) {
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
      torch::autograd::set_history(
          inputs.back(), std::shared_ptr<torch::autograd::Node>(
                             new Border, torch::autograd::deleteNode));
    }
    run_second(inputs);
    if (collected_ < end_) {
      fail(
          "saved " + std::to_string(collected_) +
          " tensors for backward the second time, and " + std::to_string(end_) +
          " or more the first time");
    }
    has_run_ = true;
    forget();
  }

  void run_second(const std::vector<Tensor>& inputs) {
    const at::ThreadLocalStateGuard thread(thread_);
    const torch::AutoGradMode gradients(true);
    const AutocastRegion autocast(autocast_cache_);
    const RandomAsBefore random(random_, generators_);
    const SavedTensorState::Scope outer(hooks_);
    const SavedTensorScope collecting(std::make_shared<Collecting>(*this));
    detail::Replay replay(
        layer_->keep, results_, layer_->options.buffers, layer_->options.name);
    const OperatorScope operators(replay);
    const SecondRun second;
    try {
      layer_->forward(inputs);
    } catch (const Stop&) {
    }
  }

  void collect(const Tensor& tensor) {
    auto& slot = slots_[collected_];
    if (!(Shape(tensor) == slot.shape)) {
      fail(
          "saved " + Shape(tensor).text() + " as tensor number " +
          std::to_string(collected_) + " for backward the second time, and " +
          slot.shape.text() + " the first time");
    }
    if (slot.wanted) slot.value = tensor;
    if (++collected_ == end_) throw Stop();
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(
        "recompute of layer \"" + layer_->options.name + "\": it " + what +
        "; what a layer computes may depend on its inputs and parameters "
        "alone");
  }

  // What only the second run needs.
  void forget() {
    inputs_.clear();
    results_.clear();
    random_ = {};
  }

  // Of the first run.
  std::shared_ptr<Layer> layer_;
  std::vector<Input> inputs_;
  at::ThreadLocalState thread_;
  SavedTensorState hooks_;
  bool autocast_cache_;
  std::vector<at::Generator> generators_;
  detail::RandomState random_;  // before it; empty: it drew nothing
  detail::KeptResults results_;
  bool complete_ = false;

  // Nodes of one graph may ask from several threads; and graphs that are
  // destroyed while forward runs again let go.
  std::recursive_mutex mutex_;
  std::vector<Slot> slots_;
  bool has_run_ = false;
  size_t end_ = 0;  // slots that the second run comes to
  size_t collected_ = 0;
};

}  // namespace

const std::vector<std::string>& matrix_products() {
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
