#include "echelon/counting/operator_flops.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace echelon {
namespace {

using c10::IntArrayRef;
using c10::IValue;

// One call: shapes of its tensors.
class Call {
 public:
  Call(const std::vector<IValue>& arguments, at::ArrayRef<IValue> results)
      : arguments_(arguments), results_(results) {}

  IntArrayRef in(size_t i) const { return arguments_[i].toTensor().sizes(); }
  IntArrayRef out(size_t i) const { return results_[i].toTensor().sizes(); }
  bool flag(size_t i) const { return arguments_[i].toBool(); }
  /// The last argument: which gradients are wanted.
  bool wanted(size_t i) const { return arguments_.back().toBoolList()[i]; }

 private:
  const std::vector<IValue>& arguments_;
  at::ArrayRef<IValue> results_;
};

double product(IntArrayRef sizes) {
  double result = 1.0;
  for (int64_t size : sizes) result *= static_cast<double>(size);
  return result;
}

// a [..., rows, inner] times b [..., inner, columns].
double matrix_product(IntArrayRef a, IntArrayRef b) {
  return 2.0 * product(a) * static_cast<double>(b.back());
}

// Each weight meets each position of the smaller side once per sample.
double
convolution(IntArrayRef x, IntArrayRef weight, IntArrayRef y, bool transposed) {
  return 2.0 * static_cast<double>(x[0]) * product(weight) *
         product((transposed ? x : y).slice(2));
}

double convolution_backward(const Call& call) {
  const double each =
      convolution(call.in(1), call.in(2), call.in(0), call.flag(7));
  return each * ((call.wanted(0) ? 1 : 0) + (call.wanted(1) ? 1 : 0));
}

// The scores, and their product with the values.
double attention(IntArrayRef query, IntArrayRef key, IntArrayRef value) {
  const double scores =
      product(query.slice(0, 3)) * static_cast<double>(key[2]);
  return 2.0 * scores * static_cast<double>(query[3] + value[3]);
}

// The scores once more; gradients of scores, values, queries and keys.
double
attention_backward(IntArrayRef query, IntArrayRef key, IntArrayRef value) {
  const double scores =
      product(query.slice(0, 3)) * static_cast<double>(key[2]);
  return 2.0 * scores * static_cast<double>(3 * query[3] + 2 * value[3]);
}

using Formula = double (*)(const Call&);

const std::unordered_map<std::string, Formula>& formulas() {
  static const auto* all = [] {
    const Formula two = [](const Call& c) {
      return matrix_product(c.in(0), c.in(1));
    };
    const Formula added = [](const Call& c) {
      return matrix_product(c.in(1), c.in(2));
    };
    const Formula vector = [](const Call& c) { return 2.0 * product(c.in(0)); };
    const Formula added_vector = [](const Call& c) {
      return 2.0 * product(c.in(1));
    };
    const Formula forward = [](const Call& c) {
      return convolution(c.in(0), c.in(1), c.out(0), c.flag(6));
    };
    const Formula attend = [](const Call& c) {
      return attention(c.in(0), c.in(1), c.in(2));
    };
    const Formula attend_backward = [](const Call& c) {
      return attention_backward(c.in(1), c.in(2), c.in(3));
    };
    auto* map = new std::unordered_map<std::string, Formula>{
        {"aten::mm", two},
        {"aten::bmm", two},
        {"aten::mv", vector},
        {"aten::dot", vector},
        {"aten::addmm", added},
        {"aten::addmm_", added},
        {"aten::baddbmm", added},
        {"aten::baddbmm_", added},
        {"aten::addbmm", added},
        {"aten::addbmm_", added},
        {"aten::addmv", added_vector},
        {"aten::addmv_", added_vector},
        {"aten::convolution", forward},
        {"aten::_convolution", forward},
        {"aten::convolution_backward", convolution_backward}};
    for (const char* kind :
         {"flash_attention", "flash_attention_for_cpu", "efficient_attention",
          "cudnn_attention", "fused_attention_overrideable"}) {
      const std::string name = std::string("aten::_scaled_dot_product_") + kind;
      map->emplace(name, attend);
      map->emplace(name + "_backward", attend_backward);
    }
    return map;
  }();
  return *all;
}

}  // namespace

bool has_flops(const std::string& op) {
  return formulas().contains(op);
}

double operator_flops(
    const std::string& op, const std::vector<IValue>& arguments,
    at::ArrayRef<IValue> results) {
  const auto formula = formulas().find(op);
  return formula == formulas().end()
             ? 0.0
             : formula->second(Call(arguments, results));
}

}  // namespace echelon
