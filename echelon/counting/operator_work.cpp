#include "echelon/counting/operator_work.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <unordered_set>

namespace echelon {
namespace {

using c10::IntArrayRef;
using c10::IValue;

int64_t product_of(IntArrayRef sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) product *= size;
  return product;
}

// One call: shapes of its tensors.
class RecordedCall {
 public:
  RecordedCall(
      const std::string& op, const std::vector<IValue>& arguments,
      at::ArrayRef<IValue> results)
      : name_(op.substr(op.rfind(':') + 1)),
        arguments_(arguments),
        results_(results) {}

  const std::string& name() const { return name_; }
  IntArrayRef in(size_t i) const { return arguments_[i].toTensor().sizes(); }
  IntArrayRef out(size_t i) const { return results_[i].toTensor().sizes(); }
  bool wanted(size_t i) const { return arguments_.back().toBoolList()[i]; }

  OperatorWork named(const char* product) const {
    OperatorWork work;
    work.name = name_;
    work.product = product;
    work.count = 1;
    return work;
  }

  // a [..., rows, inner] times b [..., inner, columns].
  OperatorWork matrices(size_t a, size_t b) const {
    OperatorWork work = named("product");
    const IntArrayRef left = in(a), right = in(b);
    const bool batched = left.size() == 3;
    if (batched) work.count = left[0];
    work.m = left.size() >= 2 ? left[left.size() - 2] : 1;
    work.k = left.back();
    work.n = right.size() >= 2 ? right.back() : 1;
    return work;
  }

  // Rows are the positions of what comes out; the depth is one filter.
  OperatorWork
  convolution(IntArrayRef weight, IntArrayRef y, const char* product) const {
    OperatorWork work = named(product);
    work.m = y[0] * product_of(y.slice(2));
    work.n = weight[0];
    work.k = product_of(weight.slice(1));
    return work;
  }

  // A sum over all but the channels.
  OperatorWork bias_gradient() const {
    OperatorWork work;
    work.name = name_ + order_of_images();
    const at::Tensor& gradient = arguments_[0].toTensor();
    work.bytes = static_cast<double>(gradient.numel()) *
                 static_cast<double>(gradient.element_size());
    work.for_weight = true;
    return work;
  }

  // Kernels of images differ by the order of their memory.
  std::string order_of_images() const {
    for (const IValue& argument : arguments_) {
      if (!argument.isTensor() || argument.toTensor().dim() != 4) continue;
      const at::Tensor& images = argument.toTensor();
      const bool last = images.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                        !images.is_contiguous();
      return last ? " channels last" : "";
    }
    return "";
  }

  // The scores of each head, once: what else there is has the same shape.
  OperatorWork attention(size_t query, size_t key, const char* product) const {
    OperatorWork work = named(product);
    const IntArrayRef q = in(query), k = in(key);
    work.count = q[0] * q[1];
    work.m = q[2];
    work.n = k[2];
    work.k = q[3];
    return work;
  }

  // Of its tensors, each storage once; 0 for a view, whose results lie in an
  // argument's storage that it does not write.
  double bytes() const {
    double sum = 0;
    std::unordered_set<const void*> seen;
    const auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      if (!seen.insert(storage).second) return;
      sum += static_cast<double>(tensor.numel()) *
             static_cast<double>(tensor.element_size());
    };
    const auto add_all = [&](const IValue& value) {
      if (value.isTensor()) {
        add(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& each : value.toTensorList()) add(each);
      }
    };
    for (const IValue& argument : arguments_) add_all(argument);
    const double read = sum;
    for (const IValue& result : results_) add_all(result);
    // In place: read, and written where it was.
    if (name_.back() == '_') return sum + (read > 0 ? first_bytes() : 0);
    return sum > read ? sum : 0;
  }

 private:
  double first_bytes() const {
    for (const IValue& argument : arguments_) {
      if (!argument.isTensor() || !argument.toTensor().defined()) continue;
      const auto& tensor = argument.toTensor();
      return static_cast<double>(tensor.numel()) *
             static_cast<double>(tensor.element_size());
    }
    return 0;
  }

  std::string name_;
  const std::vector<IValue>& arguments_;
  at::ArrayRef<IValue> results_;
};

bool is_one_of(
    const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What they move is that of the operators that they call, which are seen as
// well.
bool calls_others(const std::string& name) {
  return is_one_of(
      name, {"clone", "contiguous", "embedding", "reshape", "select_backward",
             "slice_backward", "to", "_to_copy", "zeros", "zeros_like",
             "ones_like", "full", "full_like"});
}

// Memory without values.
bool only_allocates(const std::string& name) {
  return name.starts_with("empty") || name.starts_with("new_empty");
}

std::vector<OperatorWork> convolution_gradients(const RecordedCall& call) {
  std::vector<OperatorWork> both;
  const IntArrayRef y = call.in(0), weight = call.in(2);
  if (call.wanted(0)) {
    both.push_back(call.convolution(weight, y, "convolution inputs"));
  }
  if (call.wanted(1)) {
    both.push_back(call.convolution(weight, y, "convolution weights"));
    both.back().for_weight = true;
  }
  if (call.wanted(2)) both.push_back(call.bias_gradient());
  return both;
}

}  // namespace

std::vector<OperatorWork> operator_work(
    const std::string& op, const std::vector<IValue>& arguments,
    at::ArrayRef<IValue> results) {
  const RecordedCall call(op, arguments, results);
  const std::string& name = call.name();
  if (is_one_of(name, {"mm", "bmm", "mv"})) return {call.matrices(0, 1)};
  if (is_one_of(name, {"addmm", "addmm_", "baddbmm", "baddbmm_", "addmv"})) {
    return {call.matrices(1, 2)};
  }
  if (is_one_of(name, {"convolution", "_convolution"})) {
    return {call.convolution(call.in(1), call.out(0), "convolution")};
  }
  if (name == "convolution_backward") return convolution_gradients(call);
  if (name.starts_with("_scaled_dot_product_")) {
    const bool gradient = name.ends_with("_backward");
    return {
        gradient ? call.attention(1, 2, "attention gradients")
                 : call.attention(0, 1, "attention")};
  }
  OperatorWork moves;
  const bool of_images = name.find("pool") != std::string::npos ||
                         name.find("batch_norm") != std::string::npos;
  moves.name = name + (of_images ? call.order_of_images() : "");
  if (!calls_others(name) && !only_allocates(name)) moves.bytes = call.bytes();
  return {moves};
}

}  // namespace echelon
