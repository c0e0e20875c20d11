#include "echelon/train/strategies/layer_norms.h"

#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using torch::Tensor;
using Key = std::tuple<int, int, torch::Dtype>;  // foreach wants one of each

// Gradients of one device and dtype, and the layers that they are of.
struct List {
  std::vector<Tensor> gradients;
  std::vector<int64_t> layers;
};

// The layer with the longest name that `name` begins with.
int64_t
layer_of(const std::map<std::string, int64_t>& index, const std::string& name) {
  for (size_t end = name.rfind('.'); end != std::string::npos && end > 0;
       end = name.rfind('.', end - 1)) {
    const auto found = index.find(name.substr(0, end));
    if (found != index.end()) return found->second;
  }
  throw Error("parameter \"" + name + "\" is of no layer of the model's list");
}

// Squared norms, added up by layer.
void add_squares(const List& list, Tensor& sums) {
  const auto norms = at::_foreach_norm(list.gradients, 2);
  const auto squares = at::stack(norms).to(torch::kFloat64).square_();
  sums.index_add_(
      0, torch::tensor(list.layers, torch::kInt64), squares.to(torch::kCPU));
}

}  // namespace

std::vector<double> layer_norms(
    const ParallelModel& model, const std::vector<std::string>& layers) {
  const torch::NoGradGuard no_grad;
  std::map<std::string, int64_t> index;
  for (const auto& layer : layers) {
    index.emplace(layer, static_cast<int64_t>(index.size()));
  }
  const auto parts = model.parts();
  const auto shared = model.shared_out_gradients();
  std::map<Key, List> lists;
  const auto add = [&](const Tensor& gradient, size_t part) {
    if (!gradient.defined() || gradient.numel() == 0) return;
    const auto device = gradient.device();
    auto& list = lists[{
        static_cast<int>(device.type()), device.index(),
        gradient.scalar_type()}];
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
  auto sums =
      torch::zeros({static_cast<int64_t>(layers.size())}, torch::kFloat64);
  for (const auto& [_, list] : lists) add_squares(list, sums);
  if (shared && shared->sum) shared->sum(sums);
  const auto norms = sums.to(torch::kCPU).sqrt_();
  const auto* first = norms.const_data_ptr<double>();
  return {first, first + norms.numel()};
}

}  // namespace echelon
