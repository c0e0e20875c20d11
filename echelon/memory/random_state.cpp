#include "echelon/memory/random_state.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace echelon::detail {

std::vector<at::Generator>
generators_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Generator> generators = {
      at::globalContext().defaultGenerator(at::kCPU)};
  for (const auto& tensor : tensors) {
    if (!tensor.is_cuda()) continue;
    const auto& one = at::globalContext().defaultGenerator(tensor.device());
    if (std::find(generators.begin(), generators.end(), one) ==
        generators.end()) {
      generators.push_back(one);
    }
  }
  return generators;
}

RandomState::RandomState(const std::vector<at::Generator>& generators) {
  for (auto generator : generators) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
}

void RandomState::restore() const {
  for (auto [generator, state] : states_) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

// States are bytes in the host's memory.
bool RandomState::operator==(const RandomState& other) const {
  return std::equal(
      states_.begin(), states_.end(), other.states_.begin(),
      other.states_.end(), [](const auto& a, const auto& b) {
        return a.second.nbytes() == b.second.nbytes() &&
               std::memcmp(
                   a.second.const_data_ptr(), b.second.const_data_ptr(),
                   a.second.nbytes()) == 0;
      });
}

}  // namespace echelon::detail
