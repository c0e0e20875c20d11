#include "echelon/kernels/update.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <string>

#include "echelon/comm/nccl/accelerator.h"
#include "echelon/kernels/dispatcher.h"
#include "echelon/kernels/kernel_source.h"
#include "echelon/kernels/numbers.h"
#include "echelon/kernels/update_table.h"

namespace echelon::kernels {
namespace {

using at::TensorList;
using torch::Tensor;
using MaybeNumber = std::optional<Tensor>;

constexpr int kUpdateThreads = 256;  // as in update.cu

// Scalars on the device, as update.cu has them.
struct DeviceNumbers {
  const void* rate;
  const void* factor;
  const void* skip;
};
// CUDA takes 4 KiB of arguments on every GPU.
static_assert(
    sizeof(UpdatedTensors) + sizeof(AdamNumbers) + sizeof(DeviceNumbers) <=
    4096);

const void* number_at(const MaybeNumber& x) {
  return x ? x->const_data_ptr() : nullptr;
}

template <class Numbers>
void launch_updates(
    const char* rule, const UpdateLists& lists, Numbers numbers,
    DeviceNumbers here) {
  if (lists.parameters.empty()) return;
  const Tensor& first = lists.parameters.front();
  const c10::DeviceGuard guard(first.device());
  const auto name = rule + number_suffix(first.scalar_type());
  for_each_table(lists, [&](UpdatedTensors& table, int64_t blocks) {
    std::array<void*, 3> arguments = {&table, &numbers, &here};
    launch_kernel(
        update_source().text, name, blocks, kUpdateThreads, arguments.data());
  });
}

void sgd_on_gpu(
    TensorList parameters, TensorList gradients, TensorList momenta,
    double rate, const MaybeNumber& rate_on_device, const MaybeNumber& factor,
    const MaybeNumber& skip, double momentum, double weight_decay,
    bool nesterov) {
  launch_updates(
      momenta.empty() ? "sgd" : "momentum",
      {parameters, gradients, momenta, {}, {}},
      sgd_numbers(rate, {momentum, weight_decay, nesterov}),
      {number_at(rate_on_device), number_at(factor), number_at(skip)});
}

void adam_on_gpu(
    TensorList parameters, TensorList gradients, TensorList means,
    TensorList squares, TensorList steps, double rate,
    const MaybeNumber& rate_on_device, const MaybeNumber& factor,
    const MaybeNumber& skip, double beta1, double beta2, double epsilon,
    double weight_decay, bool decoupled) {
  launch_updates(
      "adam", {parameters, gradients, means, squares, steps},
      adam_numbers(rate, {beta1, beta2, epsilon, weight_decay, decoupled}),
      {number_at(rate_on_device), number_at(factor), number_at(skip)});
}

}  // namespace

SgdNumbers sgd_numbers(double rate, const SgdSettings& settings) {
  return {
      .rate = static_cast<float>(rate),
      .momentum = static_cast<float>(settings.momentum),
      .decay = static_cast<float>(settings.weight_decay),
      .nesterov = settings.nesterov ? 1 : 0};
}

AdamNumbers adam_numbers(double rate, const AdamSettings& settings) {
  return {
      .rate = static_cast<float>(rate),
      .first_share = static_cast<float>(1 - settings.beta1),
      .beta2 = static_cast<float>(settings.beta2),
      .second_share = static_cast<float>(1 - settings.beta2),
      .log_beta1 = static_cast<float>(std::log(settings.beta1)),
      .log_beta2 = static_cast<float>(std::log(settings.beta2)),
      .epsilon = static_cast<float>(settings.epsilon),
      .decay = static_cast<float>(settings.weight_decay),
      .decoupled = settings.decoupled ? 1 : 0};
}

void for_each_table(
    const UpdateLists& lists,
    const std::function<void(UpdatedTensors& table, int64_t blocks)>& launch) {
  UpdatedTensors table;
  int64_t blocks = 0;
  const auto flush = [&] {
    if (table.count > 0) launch(table, blocks);
    table.count = 0;
    blocks = 0;
  };
  for (size_t i = 0; i < lists.parameters.size(); ++i) {
    const int64_t count = lists.parameters[i].numel();
    if (count == 0) continue;
    const auto state = [&](at::TensorList all) {
      return all.empty() ? nullptr : all[i].mutable_data_ptr();
    };
    const auto place = static_cast<size_t>(table.count++);
    table.first_block[place] = static_cast<int>(blocks);
    table.all[place] = {
        .parameter = lists.parameters[i].mutable_data_ptr(),
        .gradient = lists.gradients[i].const_data_ptr(),
        .first = state(lists.first),
        .second = state(lists.second),
        .step = state(lists.steps),
        .count = count};
    blocks += (count + kUpdateElements - 1) / kUpdateElements;
    if (table.count == kUpdateTensors) flush();
  }
  flush();
}

TORCH_LIBRARY_FRAGMENT(echelon, library) {
  library.def(
      "sgd_update_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] "
      "momenta, float rate, Tensor? rate_on_device, Tensor? factor, Tensor? "
      "skip, float momentum, float weight_decay, bool nesterov) -> ()");
  library.def(
      "adam_update_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] "
      "means, Tensor(c!)[] squares, Tensor[] steps, float rate, Tensor? "
      "rate_on_device, Tensor? factor, Tensor? skip, float beta1, float beta2, "
      "float epsilon, float weight_decay, bool decoupled) -> ()");
}
TORCH_LIBRARY_IMPL(echelon, CUDA, library) {
  library.impl("sgd_update_", sgd_on_gpu);
  library.impl("adam_update_", adam_on_gpu);
}
TORCH_LIBRARY_IMPL(echelon, Meta, library) {
  library.impl(
      "sgd_update_",
      [](TensorList, TensorList, TensorList, double, const MaybeNumber&,
         const MaybeNumber&, const MaybeNumber&, double, double, bool) {});
  library.impl(
      "adam_update_",
      [](TensorList, TensorList, TensorList, TensorList, TensorList, double,
         const MaybeNumber&, const MaybeNumber&, const MaybeNumber&, double,
         double, double, double, bool) {});
}

bool takes_update(const Tensor& parameter) {
  return is_kernel_number(parameter.scalar_type()) &&
         uses_kernels(update_source(), parameter);
}

void update_by_sgd(
    const UpdatedLists& lists, const std::vector<Tensor>& momenta,
    const UpdateStep& step, const SgdSettings& settings) {
  static const auto op = operator_named<void(
      TensorList, TensorList, TensorList, double, const MaybeNumber&,
      const MaybeNumber&, const MaybeNumber&, double, double, bool)>(
      "echelon::sgd_update_");
  op.call(
      lists.parameters, lists.gradients, momenta, step.rate,
      step.rate_on_device, step.factor, step.skip, settings.momentum,
      settings.weight_decay, settings.nesterov);
}

void update_by_adam(
    const UpdatedLists& lists, const std::vector<Tensor>& means,
    const std::vector<Tensor>& squares, const std::vector<Tensor>& steps,
    const UpdateStep& step, const AdamSettings& settings) {
  static const auto op = operator_named<void(
      TensorList, TensorList, TensorList, TensorList, TensorList, double,
      const MaybeNumber&, const MaybeNumber&, const MaybeNumber&, double,
      double, double, double, bool)>("echelon::adam_update_");
  op.call(
      lists.parameters, lists.gradients, means, squares, steps, step.rate,
      step.rate_on_device, step.factor, step.skip, settings.beta1,
      settings.beta2, settings.epsilon, settings.weight_decay,
      settings.decoupled);
}

}  // namespace echelon::kernels
