// The tensors that autograd keeps are found by looking at what is still alive.
// After a layer's forward pass only its graph is held, by the edges of its
// outputs, and all tensors are released; storages that operators made and that
// are still alive are the saved ones. This needs no hook, of which LibTorch has
// one for the whole process.
#include "echelon/counting/layer_cost.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "echelon/counting/meta_mode.h"
#include "echelon/error.h"
#include "echelon/layers/computing_device.h"
#include "echelon/layers/graph_node.h"
#include "echelon/layers/low_precision.h"
#include "echelon/layers/parameter_owner.h"
#include "echelon/text/format.h"

namespace echelon::counting {

int64_t TensorSpec::bytes() const {
  return c10::multiply_integers(shape) *
         static_cast<int64_t>(c10::elementSize(dtype));
}

std::string to_string(const TensorSpec& spec) {
  return c10::str(
      at::IntArrayRef(spec.shape), " ", c10::getDtypeNames(spec.dtype).first);
}

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using StorageKey = const c10::StorageImpl*;

StorageKey key_of(const torch::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

torch::TensorOptions meta(torch::Dtype dtype) {
  return torch::TensorOptions().device(torch::kMeta).dtype(dtype);
}

// The end of a layer's graph. Its inputs must not be leaves, which in-place
// operators refuse, nor lead to the graph of the layer before it.
struct Border : Node {
  variable_list apply(variable_list&&) override { return {}; }
};

// A tensor that passes between layers, without its storage.
struct PassedTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  torch::Dtype dtype;
  bool requires_grad = false;
  int64_t storage_bytes = 0;
  // Whether a layer has counted the storage; shared by all of its views.
  std::shared_ptr<bool> counted;
  // Whether a layer was given the storage; shared likewise.
  std::shared_ptr<bool> given = std::make_shared<bool>(false);
};

TensorSpec spec_of(const PassedTensor& tensor) {
  return {tensor.sizes, tensor.dtype};
}

// The times at which a storage was made and freed, counted in operators.
struct Lifetime {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t bytes = 0;
  size_t born = 0;
  size_t died = std::numeric_limits<size_t>::max();
  bool kept = false;  // CountOptions::keep
};

// The flat parameters and their flat gradient, into which backward writes
// gradients of matrices.
class FlatMemory : public ParameterOwner {
 public:
  FlatMemory(torch::Tensor parameters, torch::Tensor gradients)
      : parameters_(std::move(parameters)), gradients_(std::move(gradients)) {}
  ~FlatMemory() override { remove_parameter_owner(key_of(parameters_)); }

  torch::Tensor gradient_of(const torch::Tensor& weight) override {
    const bool fits = weight.is_contiguous() &&
                      weight.scalar_type() == gradients_.scalar_type();
    if (!fits || !given_.insert(weight.storage_offset()).second) return {};
    return gradients_.narrow(0, weight.storage_offset(), weight.numel())
        .view(weight.sizes());
  }
  torch::Tensor with_zero_rows(const torch::Tensor& matrix) override {
    const auto padded = padded_.find(matrix.storage_offset());
    if (padded == padded_.end()) return {};
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return parameters_.narrow(0, padded->first, padded->second)
        .view({-1, matrix.size(1)});
  }
  /// The matrix at `offset` has so many elements with the zeros behind it.
  void pad(int64_t offset, int64_t elements) { padded_[offset] = elements; }

 private:
  torch::Tensor parameters_;
  torch::Tensor gradients_;
  std::unordered_map<int64_t, int64_t> padded_;
  std::unordered_set<int64_t> given_;  // offsets
};

class Counter : public detail::OperatorObserver {
 public:
  explicit Counter(const std::vector<std::string>& keep)
      : keep_(keep.begin(), keep.end()) {}

  bool counts_whole(const std::string& op) const override {
    return has_flops(op);
  }
  void
  ran(const std::string& op, const std::vector<c10::IValue>& arguments,
      at::ArrayRef<c10::IValue> results) override {
    flops += operator_flops(op, arguments, results);
    if (notes_work) note_work(op, arguments, results);
    if (!follow) return;
    const bool kept = keep_.contains(op);
    for (const auto& result : results) {
      if (result.isTensor()) {
        see(result.toTensor(), kept);
      } else if (result.isTensorList()) {
        for (const torch::Tensor& each : result.toTensorList()) {
          see(each, kept);
        }
      }
    }
    record_freed();
    ++operators;
  }

  // Records which storages were freed.
  void record_freed() {
    std::erase_if(living_, [&](StorageKey key) {
      Lifetime& one = made.at(key);
      const auto storage = one.storage.lock();
      if (storage) {
        one.bytes = static_cast<int64_t>(storage->nbytes());
      } else {
        one.died = operators;
      }
      return !storage;
    });
  }

  // Returns the work since the last call; an operator that made a storage of
  // `gradients` is for_weight.
  std::vector<OperatorWork>
  take_work(const std::unordered_set<StorageKey>& gradients = {}) {
    std::vector<OperatorWork> taken;
    for (auto& [work, result] : work_) {
      work.for_weight |= gradients.contains(result);
      taken.push_back(std::move(work));
    }
    work_.clear();
    if (counted) counted(0);
    return taken;
  }

  double flops = 0.0;
  bool follow = true;  // record storages
  bool notes_work = false;
  std::function<void(size_t)> counted;  // of CountOptions
  size_t operators = 0;                 // that ran while `follow` was set
  std::unordered_map<StorageKey, Lifetime> made;

 private:
  void note_work(
      const std::string& op, const std::vector<c10::IValue>& arguments,
      at::ArrayRef<c10::IValue> results) {
    const bool makes = !results.empty() && results[0].isTensor() &&
                       results[0].toTensor().defined();
    const StorageKey made_here =
        makes ? key_of(results[0].toTensor()) : nullptr;
    for (auto& work : operator_work(op, arguments, results)) {
      work_.emplace_back(std::move(work), made_here);
    }
    if (counted) counted(work_.size());
  }

  void see(const torch::Tensor& tensor, bool kept) {
    if (!tensor.defined() || !tensor.is_meta()) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto [at, is_new] = made.try_emplace(
        storage,
        Lifetime{
            c10::weak_intrusive_ptr<c10::StorageImpl>(
                c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
            static_cast<int64_t>(storage->nbytes()), operators});
    at->second.kept |= kept;
    if (is_new) living_.push_back(storage);
  }

  std::unordered_set<std::string> keep_;
  std::vector<std::pair<OperatorWork, StorageKey>> work_;
  std::vector<StorageKey> living_;
};

// The peak of live bytes after any of the operators [begin, end].
int64_t peak_bytes(
    const std::vector<const Lifetime*>& lives, size_t begin, size_t end,
    size_t* when = nullptr) {
  std::vector<int64_t> change(end - begin + 2);
  for (const Lifetime* one : lives) {
    if (one->born > end || one->died <= begin) continue;
    change[std::max(one->born, begin) - begin] += one->bytes;
    if (one->died <= end) change[one->died - begin] -= one->bytes;
  }
  int64_t now = 0;
  int64_t most = 0;
  for (size_t i = 0; i + 1 < change.size(); ++i) {
    now += change[i];
    if (now <= most) continue;
    most = now;
    if (when != nullptr) *when = begin + i;
  }
  return most;
}

// While it lives, parameters on a real device take part as if they were on the
// meta device: their gradient nodes expect it, and write nothing.
class RealParameters {
 public:
  explicit RealParameters(const torch::nn::Module* module) {
    if (module == nullptr) return;
    for (const auto& parameter : module->parameters()) {
      if (parameter.is_meta() || !parameter.requires_grad()) continue;
      if (!lock_.owns_lock()) lock_ = std::unique_lock(mutex());
      auto node = torch::autograd::impl::grad_accumulator(parameter);
      expect(
          *node, at::empty(parameter.sizes(), meta(parameter.scalar_type())));
      all_.push_back({parameter, std::move(node), parameter.grad()});
      all_.back().parameter.mutable_grad() = torch::Tensor();
    }
  }
  ~RealParameters() {
    for (auto& each : all_) {
      expect(*each.node, each.parameter);
      each.parameter.mutable_grad() = each.gradient;
    }
  }
  RealParameters(const RealParameters&) = delete;
  RealParameters& operator=(const RealParameters&) = delete;

 private:
  struct One {
    torch::Tensor parameter;
    NodePointer<Node> node;
    torch::Tensor gradient;
  };
  static void expect(Node& node, const torch::Tensor& gradient) {
    node.clear_input_metadata();
    node.add_input_metadata(gradient);
  }
  static std::mutex& mutex() {
    static std::mutex all;
    return all;
  }
  std::unique_lock<std::mutex> lock_;
  std::vector<One> all_;
};

std::string list_of(const std::vector<PassedTensor>& tensors) {
  if (tensors.empty()) return "nothing";
  return join(tensors, ", ", [](const PassedTensor& tensor) {
    return to_string(spec_of(tensor));
  });
}

// Counts one layer.
class LayerCount {
 public:
  LayerCount(
      const LayerDefinition& layer, std::string from,
      const CountOptions& options)
      : layer_(layer),
        from_(std::move(from)),
        built_(build_on_meta(layer)),
        real_(built_.module.get()),
        options_(options),
        counter_(options.keep) {
    cost_.name = layer.name;
    if (options.dtype && built_.module) convert(*built_.module, *options.dtype);
    count_parameters();
    if (options.flat && built_.module) make_flat();
  }

  // Records the operators that run.
  void note(LayerOperators& operators) {
    operators_ = &operators;
    counter_.notes_work = true;
    counter_.counted = options_.counted;
  }

  std::vector<PassedTensor> run(const std::vector<PassedTensor>& given) {
    const torch::AutoGradMode gradients(true);
    detail::MetaMode mode(&counter_);
    try {
      auto taken = forward(given);
      cost_.forward_flops = std::exchange(counter_.flops, 0.0);
      if (operators_) operators_->forward = counter_.take_work();
      counter_.record_freed();
      if (options_.ran) options_.ran(layer_.name, false);
      count_forward(mode);
      ++counter_.operators;  // storages freed by now precede backward
      count_activations(given, mode);
      const size_t begin = counter_.operators;
      counter_.follow = true;
      backward();
      counter_.record_freed();
      if (options_.ran) options_.ran(layer_.name, true);
      cost_.backward_flops = counter_.flops;
      if (operators_) {
        operators_->backward = counter_.take_work(parameter_gradients());
      }
      count_backward(mode, begin);
      return taken;
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw ConfigError(format(
          "layer \"{}\", which is given {} by {}, cannot compute: {}",
          layer_.name, list_of(given), from_,
          detail::meta_failure(mode, error)));
    }
  }

  LayerCost cost() && { return std::move(cost_); }

 private:
  static void convert(torch::nn::Module& module, torch::Dtype dtype) {
    const detail::MetaMode mode;
    const auto each = [](const std::vector<torch::Tensor>& tensors,
                         torch::Dtype dtype) {
      for (auto tensor : tensors) {
        if (!tensor.is_meta() || !tensor.is_floating_point()) continue;
        tensor.set_data(tensor.detach().to(dtype));
      }
    };
    each(module.parameters(), dtype);
    each(module.buffers(), sum_dtype(dtype));
  }

  void count_parameters() {
    if (!built_.module) return;
    for (const auto& item : built_.module->named_parameters()) {
      const auto& parameter = item.value();
      if (!known_.insert(key_of(parameter)).second) continue;
      cost_.parameter_specs.push_back(
          {item.key(),
           {parameter.sizes().vec(), parameter.scalar_type()},
           parameter.requires_grad()});
      cost_.parameters += parameter.numel();
      cost_.parameter_bytes += static_cast<int64_t>(parameter.nbytes());
    }
    for (const auto& buffer : built_.module->buffers()) {
      if (!buffer.defined() || !known_.insert(key_of(buffer)).second) continue;
      cost_.buffer_bytes += static_cast<int64_t>(buffer.nbytes());
    }
  }

  // As FlatBuffer (parallel/shard) places them: matrices first, each at a
  // multiple of 16 elements.
  void make_flat() {
    const detail::MetaMode mode;
    std::vector<torch::Tensor> all;
    std::vector<std::string> names;
    for (const bool matrices : {true, false}) {
      for (const auto& item : built_.module->named_parameters()) {
        const auto& parameter = item.value();
        const bool goes =
            parameter.is_meta() && (parameter.dim() >= 2) == matrices &&
            (all.empty() || parameter.scalar_type() == all[0].scalar_type());
        if (!goes) continue;
        all.push_back(parameter);
        names.push_back(layer_.name + "." + item.key());
      }
    }
    constexpr int64_t kAlignment = 16;
    const auto up = [](int64_t number, int64_t unit) {
      return (number + unit - 1) / unit * unit;
    };
    int64_t size = 0;
    std::vector<int64_t> begins, rooms;
    for (size_t i = 0; i < all.size(); ++i) {
      const auto& one = all[i];
      const bool padded = one.dim() == 2 && options_.padded.contains(names[i]);
      begins.push_back(size);
      rooms.push_back(
          padded ? up(one.size(0), kPaddedRows) * one.size(1) : one.numel());
      size = up(size + rooms.back(), kAlignment);
    }
    if (size == 0) return;
    const auto flat = at::empty(size, meta(all[0].scalar_type()));
    const auto gradient = at::empty_like(flat);
    known_.insert({key_of(flat), key_of(gradient)});
    flat_ = std::make_shared<FlatMemory>(flat, gradient);
    set_parameter_owner(key_of(flat), flat_);
    for (size_t i = 0; i < all.size(); ++i) {
      auto& one = all[i];
      known_.erase(key_of(one));  // its memory is free for others
      one.set_data(flat.narrow(0, begins[i], one.numel()).view(one.sizes()));
      if (rooms[i] > one.numel()) flat_->pad(begins[i], rooms[i]);
    }
  }

  torch::Tensor receive(const PassedTensor& tensor) {
    auto leaf =
        at::empty_strided(tensor.sizes, tensor.strides, meta(tensor.dtype));
    inputs_.push_back(c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            leaf.storage().unsafeGetStorageImpl())));
    known_.insert(key_of(leaf));
    if (!tensor.requires_grad) return leaf;
    auto input = leaf.detach();
    torch::autograd::set_history(input, make_node<Border>());
    return input;
  }

  std::vector<PassedTensor> forward(const std::vector<PassedTensor>& given) {
    Tensors inputs;
    for (const auto& tensor : given) {
      inputs.push_back(receive(tensor));
      if (!std::exchange(*tensor.given, true)) {
        cost_.input_bytes += tensor.storage_bytes;
      }
    }
    const Tensors outputs = built_.forward(inputs);
    counter_.follow = false;
    std::unordered_map<StorageKey, std::shared_ptr<bool>> flags;
    std::unordered_map<StorageKey, std::shared_ptr<bool>> passed;
    for (size_t i = 0; i < given.size(); ++i) {
      flags.emplace(key_of(inputs[i]), given[i].counted);
      passed.emplace(key_of(inputs[i]), given[i].given);
    }
    std::vector<PassedTensor> taken;
    for (const auto& output : outputs) {
      if (!output.defined()) {
        throw ConfigError(
            "layer \"" + layer_.name + "\" returns an undefined tensor");
      }
      auto& flag = flags[key_of(output)];
      if (!flag) {
        flag = std::make_shared<bool>(false);
        flags_[key_of(output)] = flag;
      }
      taken.push_back(
          {output.sizes().vec(), output.strides().vec(), output.scalar_type(),
           output.requires_grad(),
           static_cast<int64_t>(output.storage().nbytes()), flag});
      auto& before = passed[key_of(output)];
      if (!before) before = taken.back().given;
      taken.back().given = before;
      cost_.outputs.push_back(spec_of(taken.back()));
      cost_.output_bytes += cost_.outputs.back().bytes();
      if (output.requires_grad()) {
        roots_.push_back(torch::autograd::impl::gradient_edge(output));
        gradients_.push_back(gradient_like(output));
        known_.insert(key_of(gradients_.back()));
      }
    }
    return taken;
  }

  // It is contiguous, unless the output's rows have some room behind them, as
  // logits of padded matmuls have: the loss leaves as much in their gradient.
  static torch::Tensor gradient_like(const torch::Tensor& output) {
    const auto options = meta(output.scalar_type());
    const int64_t width = output.dim() < 2 ? 0 : output.size(-1);
    const int64_t stride = output.dim() < 2 ? 0 : output.stride(-2);
    if (stride <= width || stride >= 2 * width || output.stride(-1) != 1) {
      return at::empty(output.sizes(), options);
    }
    auto sizes = output.sizes().vec();
    sizes.back() = stride;
    return at::empty(sizes, options).narrow(-1, 0, width);
  }

  // The storages that this layer's operators have made so far.
  std::vector<const Lifetime*> made_here(const detail::MetaMode& mode) const {
    std::vector<const Lifetime*> lives;
    for (const auto& [key, life] : counter_.made) {
      if (known_.contains(key) || mode.stands_in(key)) continue;
      lives.push_back(&life);
    }
    return lives;
  }

  void count_forward(const detail::MetaMode& mode) {
    if (counter_.operators == 0) return;
    const auto lives = made_here(mode);
    cost_.forward_peak_bytes = peak_bytes(lives, 0, counter_.operators - 1);
    for (const Lifetime* life : lives) {
      if (life->kept) cost_.kept_result_bytes += life->bytes;
    }
  }

  // The storages of the gradients that autograd left.
  std::unordered_set<StorageKey> parameter_gradients() const {
    std::unordered_set<StorageKey> gradients;
    if (!built_.module) return gradients;
    for (const auto& parameter : built_.module->parameters()) {
      const auto& gradient = parameter.grad();
      if (gradient.defined()) gradients.insert(key_of(gradient));
    }
    return gradients;
  }

  // `begin`: the first operator of backward.
  void count_backward(const detail::MetaMode& mode, size_t begin) {
    int64_t base = 0;
    const auto gradients = parameter_gradients();
    std::vector<const Lifetime*> all;
    std::vector<const Lifetime*> others;
    std::vector<const Lifetime*> of_parameters;
    for (const auto& [key, life] : counter_.made) {
      if (known_.contains(key) || mode.stands_in(key)) continue;
      if (life.born < begin && life.died >= begin) base += life.bytes;
      all.push_back(&life);
      (gradients.contains(key) ? of_parameters : others).push_back(&life);
    }
    int64_t given = 0;
    for (const auto& gradient : gradients_) {
      given += static_cast<int64_t>(gradient.nbytes());
    }
    if (counter_.operators == begin) return;
    const size_t end = counter_.operators - 1;
    size_t when = begin;
    cost_.backward_peak_bytes =
        given + peak_bytes(all, begin, end, &when) - base;
    cost_.backward_peak_gradient_bytes = peak_bytes(of_parameters, when, when);
    cost_.backward_working_bytes =
        given + peak_bytes(others, begin, end) - base;
  }

  // Called when only the tensors that the graph keeps are still alive.
  void count_activations(
      const std::vector<PassedTensor>& given, const detail::MetaMode& mode) {
    std::unordered_set<const bool*> here;
    for (size_t i = 0; i < given.size(); ++i) {
      if (inputs_[i].expired()) continue;
      bool& counted = *given[i].counted;
      if (!here.insert(&counted).second) continue;
      (counted ? cost_.repeated_bytes : cost_.activation_bytes) +=
          given[i].storage_bytes;
      cost_.kept_input_bytes += given[i].storage_bytes;
      counted = true;
    }
    for (const auto& [key, life] : counter_.made) {
      if (known_.contains(key) || mode.stands_in(key)) continue;
      if (life.storage.expired()) continue;
      cost_.activation_bytes += life.bytes;
      const auto output = flags_.find(key);
      if (output != flags_.end()) *output->second = true;
    }
  }

  void backward() {
    if (roots_.empty()) return;
    torch::autograd::Engine::get_default_engine().execute(
        roots_, gradients_, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/true);
  }

  const LayerDefinition& layer_;
  std::string from_;
  BuiltLayer built_;
  RealParameters real_;
  std::shared_ptr<FlatMemory> flat_;
  LayerCost cost_;
  const CountOptions& options_;
  Counter counter_;
  LayerOperators* operators_ = nullptr;
  std::unordered_set<StorageKey> known_;  // parameters, buffers, inputs
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> inputs_;
  std::unordered_map<StorageKey, std::shared_ptr<bool>> flags_;  // of outputs
  torch::autograd::edge_list roots_;
  variable_list gradients_;
};

// `operators` may be null.
std::vector<LayerCost> count_each(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options, std::vector<LayerOperators>* operators) {
  const CountedFor device(options.device);
  std::vector<PassedTensor> tensors;
  for (auto input : inputs) {
    if (options.dtype && c10::isFloatingType(input.dtype)) {
      input.dtype = *options.dtype;
    }
    const auto strides = c10::contiguous_strides(input.shape);
    tensors.push_back(
        {input.shape,
         {strides.begin(), strides.end()},
         input.dtype,
         false,
         input.bytes(),
         std::make_shared<bool>(false)});
  }
  std::vector<LayerCost> costs;
  std::string from = "the batch";
  for (const auto& layer : layers.layers()) {
    LayerCount count(layer, from, options);
    if (operators) count.note(operators->emplace_back());
    tensors = count.run(tensors);
    costs.push_back(std::move(count).cost());
    from = "layer \"" + layer.name + "\"";
  }
  return costs;
}

}  // namespace

std::vector<LayerCost> count_layers(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options) {
  return count_each(layers, inputs, options, nullptr);
}

CountedOperators count_operators(
    const LayerList& layers, const std::vector<TensorSpec>& inputs,
    const CountOptions& options) {
  CountedOperators counted;
  counted.costs = count_each(layers, inputs, options, &counted.layers);
  return counted;
}

std::vector<double> flops_of(const std::vector<LayerCost>& costs) {
  std::vector<double> flops;
  for (const auto& cost : costs) flops.push_back(cost.flops());
  return flops;
}

int64_t activation_bytes(
    const std::vector<LayerCost>& costs, size_t begin, size_t end) {
  int64_t bytes = begin < end ? costs[begin].repeated_bytes : 0;
  for (size_t i = begin; i < end; ++i) bytes += costs[i].activation_bytes;
  return bytes;
}

}  // namespace echelon::counting
