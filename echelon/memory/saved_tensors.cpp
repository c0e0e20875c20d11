#include "echelon/memory/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <utility>
#include <vector>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

namespace autograd = torch::autograd;
using torch::Tensor;

// The innermost hooks are last; null hides those before it.
std::vector<std::shared_ptr<SavedTensorHooks>>& hooks_of_thread() {
  thread_local std::vector<std::shared_ptr<SavedTensorHooks>> hooks;
  return hooks;
}

// One saved tensor. Autograd does not check the version of a tensor that has
// hooks, so this class does.
class Packed : public autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const Tensor& tensor) override {
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    version_ = counter_.current_version();
    // Shares storage and version, and holds no graph.
    const Tensor alone = tensor.tensor_data();
    const auto& hooks = hooks_of_thread();
    const auto take = [&](size_t i) {
      const auto mine = hooks[i - 1];
      unpack_ = mine->pack(alone);
      return static_cast<bool>(unpack_);
    };
    for (size_t i = hooks.size(); i > 0 && hooks[i - 1]; --i) {
      if (hooks[i - 1]->owns(alone) && take(i)) return;
    }
    for (size_t i = hooks.size(); i > 0 && hooks[i - 1]; --i) {
      if (take(i)) return;
    }
    // A leaf is kept itself, since set_data may change what it refers to.
    // Another tensor would form a cycle: the saving node may have made it.
    kept_ = tensor.is_leaf() ? tensor : alone;
  }

  Tensor call_unpack_hook() override {
    const auto now = counter_.current_version();
    if (now != version_) {
      throw Error(format(
          "a tensor that backward needs was changed in place after it was "
          "saved for it: it is at version {}, and {} was expected; change a "
          "copy, or change it after backward",
          now, version_));
    }
    return unpack_ ? unpack_() : kept_;
  }

 private:
  c10::VariableVersion counter_{0};
  uint32_t version_ = 0;
  std::function<Tensor()> unpack_;
  Tensor kept_;
};

class Engine : public autograd::Engine {
 public:
  std::unique_ptr<autograd::SavedVariableHooks>
  get_default_saved_variable_hooks() override {
    const auto& hooks = hooks_of_thread();
    if (hooks.empty() || !hooks.back()) return nullptr;
    return std::make_unique<Packed>();
  }
};

autograd::Engine& engine() {
  // Never destroyed: its threads may outlive main.
  static auto* const only = new Engine;
  return *only;
}

// Set before any backward pass, which would start another engine.
[[maybe_unused]] const bool installed = [] {
  autograd::set_default_engine_stub(engine);
  return true;
}();

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks) {
  hooks_of_thread().push_back(std::move(hooks));
}

SavedTensorScope::~SavedTensorScope() {
  hooks_of_thread().pop_back();
}

SavedTensorState::SavedTensorState() : hooks_(hooks_of_thread()) {}

SavedTensorState::Scope::Scope(const SavedTensorState& state)
    : before_(std::exchange(hooks_of_thread(), state.hooks_)) {}

SavedTensorState::Scope::~Scope() {
  hooks_of_thread() = std::move(before_);
}

std::function<Tensor()> save_tensor(const Tensor& tensor) {
  // A tensor without history is saved itself: hooks may know its address.
  auto saved = std::make_shared<autograd::SavedVariable>(
      tensor.requires_grad() ? tensor.tensor_data() : tensor,
      /*is_output=*/false);
  return [saved] { return saved->unpack(); };
}

}  // namespace echelon
