// Two tables by operator. FLOPs come from formulas over the shapes of a call.
// Work is, for matmuls, convolutions and attention, the shape of the product,
// and for all other operators the bytes that they move; an operator that only
// calls others has none, since those are seen by themselves.
#include "echelon/counting/operator_work.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace echelon::counting {
namespace {

using c10::IntArrayRef;
using c10::IValue;

// The shapes of one call's tensors.
class RecordedCall {
 public:
  RecordedCall(
      const std::string& op, const std::vector<IValue>& arguments,
      at::ArrayRef<IValue> results)
      : op_(op),
        name_(op.substr(op.rfind(':') + 1)),
        arguments_(arguments),
        results_(results) {}

  const std::string& name() const { return name_; }
  IntArrayRef in(size_t i) const { return arguments_[i].toTensor().sizes(); }
  IntArrayRef out(size_t i) const { return results_[i].toTensor().sizes(); }
  bool flag(size_t i) const { return arguments_[i].toBool(); }
  // The last argument of a backward operator: the gradients that are wanted.
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
    work.one_weight =
        right.size() == 3 && arguments_[b].toTensor().stride(0) == 0;
    work.m = left.size() >= 2 ? left[left.size() - 2] : 1;
    work.k = left.back();
    work.n = right.size() >= 2 ? right.back() : 1;
    return work;
  }

  // A row for each position of the output; the depth is that of one filter.
  OperatorWork
  convolution(IntArrayRef weight, IntArrayRef y, const char* product) const {
    OperatorWork work = named(product);
    work.m = y[0] * c10::multiply_integers(y.slice(2));
    work.n = weight[0];
    work.k = c10::multiply_integers(weight.slice(1));
    return work;
  }

  // A sum over all dimensions but the channels.
  OperatorWork bias_gradient() const {
    OperatorWork work;
    work.name = name_ + order_of_images();
    work.bytes = static_cast<double>(arguments_[0].toTensor().nbytes());
    work.for_weight = true;
    return work;
  }

  // Kernels for images depend on their memory order.
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

  // The scores of each head, once: the other products have the same shape.
  OperatorWork attention(size_t query, size_t key, const char* product) const {
    OperatorWork work = named(product);
    const IntArrayRef q = in(query), k = in(key);
    work.count = q[0] * q[1];
    work.m = q[2];
    work.n = k[2];
    work.k = q[3];
    // The first flag of these operators; its place differs.
    for (const IValue& argument : arguments_) {
      if (!argument.isBool()) continue;
      work.causal = argument.toBool();
      break;
    }
    return work;
  }

  // The bytes of its tensors, each storage once. 0 for a view, whose results
  // share the storage of an argument that it does not write.
  double bytes() const {
    double sum = 0;
    std::unordered_set<const void*> seen;
    const auto add = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      if (!seen.insert(storage).second) return;
      sum += static_cast<double>(tensor.nbytes());
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
    // An in-place operator reads what it writes.
    if (name_.back() == '_') return sum + (read > 0 ? written_bytes() : 0);
    return sum > read ? sum : 0;
  }

 private:
  // Those of its first tensor, or of all tensors of the lists that ours write.
  double written_bytes() const {
    double sum = 0;
    const auto ours = op_.starts_with("echelon::")
                          ? c10::Dispatcher::singleton().findSchema({op_, ""})
                          : std::nullopt;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const IValue& argument = arguments_[i];
      if (!ours && argument.isTensor() && argument.toTensor().defined()) {
        return static_cast<double>(argument.toTensor().nbytes());
      }
      if (!ours || !argument.isTensorList()) continue;
      const auto* alias = ours->schema().arguments()[i].alias_info();
      if (!alias || !alias->isWrite()) continue;
      for (const at::Tensor& each : argument.toTensorList()) {
        sum += static_cast<double>(each.nbytes());
      }
    }
    return sum;
  }

  std::string op_;
  std::string name_;
  const std::vector<IValue>& arguments_;
  at::ArrayRef<IValue> results_;
};

double product(IntArrayRef sizes) {
  return static_cast<double>(c10::multiply_integers(sizes));
}

// a [..., rows, inner] times b [..., inner, columns].
double matmul_flops(IntArrayRef a, IntArrayRef b) {
  return 2.0 * product(a) * static_cast<double>(b.back());
}

// Each weight meets each position of the smaller side once per sample.
double convolution_flops(
    IntArrayRef x, IntArrayRef weight, IntArrayRef y, bool transposed) {
  return 2.0 * static_cast<double>(x[0]) * product(weight) *
         product((transposed ? x : y).slice(2));
}

double convolution_backward_flops(const RecordedCall& call) {
  const double each =
      convolution_flops(call.in(1), call.in(2), call.in(0), call.flag(7));
  return each * ((call.wanted(0) ? 1 : 0) + (call.wanted(1) ? 1 : 0));
}

// `of_query` and `of_value` count the products of the scores' shape that have
// the width of the queries and of the values.
double attention_flops(
    IntArrayRef query, IntArrayRef key, IntArrayRef value, int64_t of_query,
    int64_t of_value) {
  const double scores =
      product(query.slice(0, 3)) * static_cast<double>(key[2]);
  return 2.0 * scores *
         static_cast<double>(of_query * query[3] + of_value * value[3]);
}

using Formula = double (*)(const RecordedCall&);

const std::unordered_map<std::string, Formula>& formulas() {
  static const auto* all = [] {
    const Formula two = [](const RecordedCall& c) {
      return matmul_flops(c.in(0), c.in(1));
    };
    const Formula added = [](const RecordedCall& c) {
      return matmul_flops(c.in(1), c.in(2));
    };
    // kernels/fp8.h: [m, k] times the transpose of [n, k].
    const Formula of_transposed = [](const RecordedCall& c) {
      return 2.0 * product(c.in(1)) * static_cast<double>(c.in(2)[0]);
    };
    const Formula vector = [](const RecordedCall& c) {
      return 2.0 * product(c.in(0));
    };
    const Formula added_vector = [](const RecordedCall& c) {
      return 2.0 * product(c.in(1));
    };
    const Formula forward = [](const RecordedCall& c) {
      return convolution_flops(c.in(0), c.in(1), c.out(0), c.flag(6));
    };
    // The scores, and their product with the values.
    const Formula attend = [](const RecordedCall& c) {
      return attention_flops(c.in(0), c.in(1), c.in(2), 1, 1);
    };
    // The scores again; gradients of scores, values, queries and keys.
    const Formula attend_backward = [](const RecordedCall& c) {
      return attention_flops(c.in(1), c.in(2), c.in(3), 3, 2);
    };
    auto* map = new std::unordered_map<std::string, Formula>{
        {"aten::mm", two},
        {"echelon::fp8_mm_", of_transposed},
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
        {"aten::convolution_backward", convolution_backward_flops}};
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

bool is_one_of(
    const std::string& name, std::initializer_list<const char*> names) {
  return std::ranges::find(names, name) != names.end();
}

// The operators that these call move the bytes, and are seen too.
bool calls_others(const std::string& name) {
  return is_one_of(
      name, {"clone", "constant_pad_nd", "contiguous", "embedding", "reshape",
             "select_backward", "slice_backward", "to", "_to_copy", "zeros",
             "zeros_like", "ones_like", "full", "full_like"});
}

// Allocates memory without writing values.
bool only_allocates(const std::string& name) {
  return name.starts_with("empty") || name.starts_with("new_empty");
}

// The kernels of operators that make more than one on a GPU, estimated: those
// that sort indices take another number for few of them. Attention has one in
// forward; in backward the sums of output times gradient, the gradients, and
// the conversion of those of the queries. The CPU's fused attention stands for
// any.
int64_t kernels_of(const std::string& name) {
  static const std::unordered_map<std::string, int64_t> several = {
      {"_scaled_dot_product_flash_attention_for_cpu_backward", 3},
      {"_scaled_dot_product_flash_attention_backward", 3},
      {"native_layer_norm_backward", 2},  // inputs; weights with biases
      {"_fused_rms_norm_backward", 2},
      {"native_batch_norm", 3},  // two of statistics
      {"native_batch_norm_backward", 2},
      {"native_group_norm_backward", 3},
      {"largest_magnitude", 2},         // its memory is set to 0 first
      {"embedding_dense_backward", 8},  // a sort, its counts, the sums
      {"embedding_gradient", 8},        // a sort, its places, the sums
      {"index_put_", 8},
      {"_index_put_impl_", 8}};
  const auto found = several.find(name);
  return found == several.end() ? 1 : found->second;
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

bool has_flops(const std::string& op) {
  return formulas().contains(op);
}

double operator_flops(
    const std::string& op, const std::vector<IValue>& arguments,
    at::ArrayRef<IValue> results) {
  const auto formula = formulas().find(op);
  return formula == formulas().end()
             ? 0.0
             : formula->second({op, arguments, results});
}

std::vector<OperatorWork> operator_work(
    const std::string& op, const std::vector<IValue>& arguments,
    at::ArrayRef<IValue> results) {
  const RecordedCall call(op, arguments, results);
  const std::string& name = call.name();
  if (is_one_of(name, {"mm", "bmm", "mv"})) return {call.matrices(0, 1)};
  if (name == "fp8_mm_") {
    OperatorWork work = call.matrices(1, 2);
    work.n = call.in(2)[0];
    return {work};
  }
  if (is_one_of(name, {"addmm", "addmm_", "baddbmm", "baddbmm_", "addmv"})) {
    return {call.matrices(1, 2)};
  }
  if (is_one_of(name, {"convolution", "_convolution"})) {
    return {call.convolution(call.in(1), call.out(0), "convolution")};
  }
  if (name == "convolution_backward") return convolution_gradients(call);
  if (name.starts_with("_scaled_dot_product_")) {
    const bool gradient = name.ends_with("_backward");
    OperatorWork work = gradient ? call.attention(1, 2, "attention gradients")
                                 : call.attention(0, 1, "attention");
    work.launches = kernels_of(name);
    return {work};
  }
  OperatorWork moves;
  const bool of_images = name.find("pool") != std::string::npos ||
                         name.find("batch_norm") != std::string::npos;
  moves.name = name + (of_images ? call.order_of_images() : "");
  if (!calls_others(name) && !only_allocates(name)) moves.bytes = call.bytes();
  moves.launches = moves.bytes > 0 ? kernels_of(name) : 0;
  return {moves};
}

}  // namespace echelon::counting
