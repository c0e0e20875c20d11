// A collective is a linear map, so one autograd function serves all: its node
// has the adjoint as a closure, which calls the adjoint's own function of this
// file. No tensor is saved. A collective runs as one operator, so that
// selective recompute may keep its result.
#include "echelon/comm/differentiable.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "echelon/comm/trace/record.h"
#include "echelon/error.h"
#include "echelon/profiling/operator_scope.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;
using Map = std::function<Tensor(const Tensor&)>;
using Sizes = std::vector<int64_t>;

struct Adjoint : torch::CustomClassHolder {
  explicit Adjoint(Map map) : map(std::move(map)) {}
  Map map;
};

// y = forward(x), with the backward `adjoint`. The adjoints below are functions
// of this file too, so backward is differentiable.
class Linear : public torch::autograd::Function<Linear> {
 public:
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& input,
      const Map& forward, const Map& adjoint) {
    context->saved_data["adjoint"] =
        c10::IValue::make_capsule(c10::make_intrusive<Adjoint>(adjoint));
    return forward(input);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list grads) {
    const auto capsule = context->saved_data["adjoint"].toCapsule();
    const auto& adjoint = static_cast<const Adjoint&>(*capsule);
    return {adjoint.map(grads[0]), Tensor(), Tensor()};
  }
};

Tensor linear(const Tensor& input, const Map& forward, const Map& adjoint) {
  return Linear::apply(input, forward, adjoint);
}

// The same for a forward that communicates and returns a new tensor.
Tensor sent(const Tensor& input, const Map& forward, const Map& adjoint) {
  const auto one_operator = [&](const Tensor& x) {
    return profiling::as_one_operator("echelon::collective", [&] {
      return std::vector<Tensor>{forward(x)};
    })[0];
  };
  return linear(input, one_operator, adjoint);
}

template <typename... Values>
[[noreturn]] void refuse(
    const char* name, const Group& group,
    std::type_identity_t<detail::FormatPattern<sizeof...(Values)>> rule,
    const Values&... values) {
  throw ConfigError(
      format("{} on axis {}: {}", name, group.axis(), format(rule, values...)));
}

int64_t checked_dim(
    const char* name, const Tensor& input, const Group& group, int64_t dim) {
  if (dim < -input.dim() || dim >= input.dim()) {
    refuse(
        name, group, "dim={}, but the input is {}", dim,
        shape_text(input.sizes().vec()));
  }
  return dim < 0 ? dim + input.dim() : dim;
}

// Checks that there is one size per rank, none negative, and that they sum to
// `total`, unless that is negative.
void check_sizes(
    const char* name, const Group& group, const Sizes& sizes, int64_t total) {
  const bool negative =
      std::ranges::any_of(sizes, [](int64_t size) { return size < 0; });
  if (negative || sizes.size() != static_cast<size_t>(group.size())) {
    refuse(
        name, group, "sizes {}, but {} ranks need one size >= 0 each",
        shape_text(sizes), group.size());
  }
  const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (total >= 0 && sum != total) {
    refuse(
        name, group, "sizes {} sum to {}, but the input has {}",
        shape_text(sizes), sum, total);
  }
}

// The slices' sizes of a gather; this rank's slice has `own` rows.
Sizes gather_sizes(
    const char* name, const Group& group, const Sizes& sizes, int64_t own) {
  if (sizes.empty()) return Sizes(group.size(), own);
  check_sizes(name, group, sizes, -1);
  if (sizes[group.rank()] != own) {
    refuse(
        name, group,
        "sizes {} give rank {} a slice of {}, but its input has {}",
        shape_text(sizes), group.rank(), sizes[group.rank()], own);
  }
  return sizes;
}

Sizes scatter_sizes(
    const char* name, const Group& group, const Sizes& sizes, int64_t total) {
  if (sizes.empty()) return even_split(total, group.size());
  check_sizes(name, group, sizes, total);
  return sizes;
}

bool equal(const Sizes& sizes) {
  return std::ranges::all_of(
      sizes, [&](int64_t size) { return size == sizes[0]; });
}

Sizes with_first(const Tensor& like, int64_t first) {
  Sizes shape = like.sizes().vec();
  shape[0] = first;
  return shape;
}

// Moves `dim` to the front, contiguous; and back, to a tensor that is no view.
Tensor to_front(const Tensor& tensor, int64_t dim) {
  return tensor.movedim(dim, 0).contiguous();
}

Tensor from_front(const Tensor& tensor, int64_t dim) {
  return dim == 0 ? tensor : tensor.movedim(0, dim).contiguous();
}

// x_r [sizes[r], …] -> [sum of sizes, …]. The backends gather equal slices
// only, so unequal ones are padded to the largest.
Tensor concatenate(
    const Tensor& x, const Group& group, const Sizes& sizes, const Call& call) {
  const int64_t longest = std::ranges::max(sizes);
  const auto padded_shape = with_first(x, longest * group.size());
  if (equal(sizes)) {
    Tensor out = torch::empty(padded_shape, x.options());
    group.all_gather(out, x, call).wait();
    return out;
  }
  Tensor in = torch::zeros(with_first(x, longest), x.options());
  in.narrow(0, 0, x.size(0)).copy_(x);
  Tensor padded = torch::empty(padded_shape, x.options());
  group.all_gather(padded, in, call).wait();
  std::vector<Tensor> slices;
  for (int rank = 0; rank < group.size(); ++rank) {
    slices.push_back(padded.narrow(0, rank * longest, sizes[rank]));
  }
  return torch::cat(slices);
}

Tensor concatenated(
    const Tensor& input, const Group& group, int64_t dim, const Sizes& sizes,
    const std::string& label, const Map& adjoint) {
  return sent(
      input,
      [&](const Tensor& x) {
        return from_front(
            concatenate(to_front(x, dim), group, sizes, {.label = label}), dim);
      },
      adjoint);
}

// x_r [sum of sizes, …] -> this rank's slice of their sum.
Tensor sum_slice(
    const Tensor& x, const Group& group, const Sizes& sizes, const Call& call) {
  const int64_t longest = std::ranges::max(sizes);
  Tensor in = x;
  if (!equal(sizes)) {
    in = torch::zeros(with_first(x, longest * group.size()), x.options());
    int64_t begin = 0;
    for (int rank = 0; rank < group.size(); ++rank) {
      in.narrow(0, rank * longest, sizes[rank])
          .copy_(x.narrow(0, begin, sizes[rank]));
      begin += sizes[rank];
    }
  }
  Tensor out = torch::empty(with_first(x, longest), x.options());
  group.reduce_scatter(out, in, ReduceOp::sum, call).wait();
  const int64_t own = sizes[group.rank()];
  return own == longest ? out : out.narrow(0, 0, own).clone();
}

Tensor own_copy(const Tensor& x) {
  return x.clone(torch::MemoryFormat::Contiguous);
}

Tensor sum(const Tensor& x, const Group& group, const Call& call) {
  Tensor out = own_copy(x);
  group.all_reduce(out, ReduceOp::sum, call).wait();
  return out;
}

void check_peer(const char* name, const Group& group, int peer) {
  if (peer < 0 || peer >= group.size()) {
    refuse(
        name, group, "rank {} is not one of the group's {} ranks", peer,
        group.size());
  }
}

}  // namespace

std::vector<int64_t> even_split(int64_t total, int parts) {
  Sizes sizes(parts, total / parts);
  for (int64_t i = 0; i < total % parts; ++i) ++sizes[i];
  return sizes;
}

Tensor
copy_to(const Tensor& input, const Group& group, const std::string& label) {
  if (group.size() == 1) return input;
  return linear(
      input, [](const Tensor& x) { return x.detach(); },
      [=](const Tensor& g) { return reduce_from(g, group, label); });
}

Tensor
reduce_from(const Tensor& input, const Group& group, const std::string& label) {
  if (group.size() == 1) return input;
  return sent(
      input, [&](const Tensor& x) { return sum(x, group, {.label = label}); },
      [=](const Tensor& g) { return copy_to(g, group, label); });
}

Tensor gather_from(
    const Tensor& input, const Group& group, int64_t dim, const Sizes& sizes,
    const std::string& label) {
  if (group.size() == 1) return input;
  const int64_t d = checked_dim("gather_from", input, group, dim);
  const auto all = gather_sizes("gather_from", group, sizes, input.size(d));
  return concatenated(input, group, d, all, label, [=](const Tensor& g) {
    return scatter_to(g, group, d, all, label);
  });
}

Tensor scatter_to(
    const Tensor& input, const Group& group, int64_t dim, const Sizes& sizes,
    const std::string& label) {
  if (group.size() == 1) return input;
  const int64_t d = checked_dim("scatter_to", input, group, dim);
  const auto all = scatter_sizes("scatter_to", group, sizes, input.size(d));
  return linear(
      input,
      [&](const Tensor& x) {
        const int64_t begin = std::accumulate(
            all.begin(), all.begin() + group.rank(), int64_t{0});
        return own_copy(x.narrow(d, begin, all[group.rank()]));
      },
      [=](const Tensor& g) { return gather_from(g, group, d, all, label); });
}

Tensor all_reduce_sum(
    const Tensor& input, const Group& group, const std::string& label) {
  if (group.size() == 1) return input;
  return sent(
      input, [&](const Tensor& x) { return sum(x, group, {.label = label}); },
      [=](const Tensor& g) { return all_reduce_sum(g, group, label); });
}

Tensor all_gather(
    const Tensor& input, const Group& group, int64_t dim, const Sizes& sizes,
    const std::string& label) {
  if (group.size() == 1) return input;
  const int64_t d = checked_dim("all_gather", input, group, dim);
  const auto all = gather_sizes("all_gather", group, sizes, input.size(d));
  return concatenated(input, group, d, all, label, [=](const Tensor& g) {
    return reduce_scatter(g, group, d, all, label);
  });
}

Tensor reduce_scatter(
    const Tensor& input, const Group& group, int64_t dim, const Sizes& sizes,
    const std::string& label) {
  if (group.size() == 1) return input;
  const int64_t d = checked_dim("reduce_scatter", input, group, dim);
  const auto all = scatter_sizes("reduce_scatter", group, sizes, input.size(d));
  return sent(
      input,
      [&](const Tensor& x) {
        return from_front(
            sum_slice(to_front(x, d), group, all, {.label = label}), d);
      },
      [=](const Tensor& g) { return all_gather(g, group, d, all, label); });
}

Tensor all_to_all(
    const Tensor& input, const Group& group, const Sizes& input_splits,
    const Sizes& output_splits, const std::string& label) {
  if (group.size() == 1) return input;
  checked_dim("all_to_all", input, group, 0);
  const int64_t rows = input.size(0);
  if (input_splits.empty() != output_splits.empty() ||
      (input_splits.empty() && rows % group.size() != 0)) {
    refuse(
        "all_to_all", group,
        "{} rows do not divide by {} ranks, or one list of splits is "
        "missing: give input_splits and output_splits",
        rows, group.size());
  }
  int64_t out_rows = rows;
  if (!input_splits.empty()) {
    check_sizes("all_to_all", group, input_splits, rows);
    check_sizes("all_to_all", group, output_splits, -1);
    out_rows =
        std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0});
  }
  return sent(
      input,
      [&](const Tensor& x) {
        Tensor out = torch::empty(with_first(x, out_rows), x.options());
        group
            .all_to_all(
                out, x.contiguous(), output_splits, input_splits,
                {.label = label})
            .wait();
        return out;
      },
      [=](const Tensor& g) {
        return all_to_all(g, group, output_splits, input_splits, label);
      });
}

Tensor broadcast_from(
    const Tensor& input, const Group& group, int source,
    const std::string& label) {
  check_peer("broadcast_from", group, source);
  if (group.size() == 1) return input;
  return sent(
      input,
      [&](const Tensor& x) {
        Tensor out = own_copy(x);
        group.broadcast(out, source, {.label = label}).wait();
        return out;
      },
      [=](const Tensor& g) { return reduce_to(g, group, source, label); });
}

Tensor reduce_to(
    const Tensor& input, const Group& group, int destination,
    const std::string& label) {
  check_peer("reduce_to", group, destination);
  if (group.size() == 1) return input;
  return sent(
      input,
      [&](const Tensor& x) {
        Tensor out = own_copy(x);
        group.reduce(out, destination, ReduceOp::sum, {.label = label}).wait();
        if (group.rank() != destination) out.zero_();
        return out;
      },
      [=](const Tensor& g) {
        return broadcast_from(g, group, destination, label);
      });
}

Tensor shift(
    const Tensor& input, const Group& group, int offset,
    const std::string& label) {
  const int size = group.size();
  const int ahead = ((offset % size) + size) % size;
  if (ahead == 0) return input;
  return sent(
      input,
      [&](const Tensor& x) {
        Tensor out = torch::empty_like(x, torch::MemoryFormat::Contiguous);
        const int to = (group.rank() + ahead) % size;
        const int from = (group.rank() + size - ahead) % size;
        group
            .batch_send_recv(
                {{.send = true, .tensor = x.contiguous(), .peer = to},
                 {.send = false, .tensor = out, .peer = from}},
                {.label = label})
            .wait();
        return out;
      },
      [=](const Tensor& g) { return shift(g, group, -ahead, label); });
}

}  // namespace echelon
