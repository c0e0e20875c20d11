// PowerSGD: a gradient M [n, m] is sent as P Q^T of rank r. Each step is one
// round of a power iteration: P = M Q is summed over the ranks and
// orthonormalised, then Q = M^T P is summed. What the approximation lost is
// added to M in the next step (error feedback), and Q starts from the last one
// (warm start). Gradients that this would not make smaller are summed exactly.
//
// All P of a bucket are one message, and all Q; P is sent while backward goes
// on, Q when the bucket is completed.
#include "echelon/parallel/data/communication_hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using torch::Tensor;

BucketCompletion exact(GradientBucket& bucket, const Group& group) {
  const bool all_ranks = bucket.divisor == group.size();
  const Work work = group.all_reduce(
      bucket.flat, all_ranks ? ReduceOp::avg : ReduceOp::sum,
      {.label = bucket.label, .async = true});
  return [work, all_ranks, &bucket] {
    work.wait();
    if (!all_ranks) bucket.flat.div_(static_cast<double>(bucket.divisor));
  };
}

}  // namespace

BucketHook all_reduce_hook() {
  return exact;
}

BucketHook bf16_hook() {
  return [](GradientBucket& bucket, const Group& group) -> BucketCompletion {
    const Tensor sent = bucket.flat.to(torch::kBFloat16);
    const Work work = group.all_reduce(
        sent, ReduceOp::sum, {.label = bucket.label, .async = true});
    return [work, sent, &bucket] {
      work.wait();
      bucket.flat.copy_(sent).div_(static_cast<double>(bucket.divisor));
    };
  };
}

BucketHook fp16_hook() {
  return [](GradientBucket& bucket, const Group& group) -> BucketCompletion {
    const Tensor sent =
        bucket.flat.div(static_cast<double>(bucket.divisor)).to(torch::kHalf);
    const Work work = group.all_reduce(
        sent, ReduceOp::sum, {.label = bucket.label, .async = true});
    return [work, sent, &bucket] {
      work.wait();
      bucket.flat.copy_(sent);
    };
  };
}

// ----------------------------------------------------------------- PowerSGD

namespace {

// FNV-1a: the same on every machine, unlike std::hash.
uint64_t name_hash(const std::string& name) {
  uint64_t hash = 14695981039346656037ull;
  for (const unsigned char c : name) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

// One compressed gradient [n, m], and its factors of rank r.
struct Matrix {
  size_t slot = 0;  // in the bucket
  int64_t n = 0, m = 0, r = 0;
  Tensor value{};  // [n, m] the gradient, plus the last step's error
  Tensor p{};      // [n, r] a view of the flat factors that are sent
  Tensor q{};      // [m, r]
};

// State from step to step, by the parameter's name: a parameter may move to
// another bucket.
struct MatrixState {
  Tensor error;  // [n, m]
  Tensor q;      // [m, r]
};

class PowerSgd : public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(const PowerSgdOptions& options) : options_(options) {
    if (options.rank < 1) {
      throw ConfigError(format(
          "[powersgd] rank={}; the rank of the approximation is at least 1",
          options.rank));
    }
  }

  BucketCompletion start(GradientBucket& bucket, const Group& group);

 private:
  // The communication of one bucket in progress.
  struct Reduction {
    std::vector<Matrix> matrices;
    std::vector<size_t> exact_slots;
    Tensor exact, p, q;  // flat
    Work exact_work, p_work;
  };

  bool compresses(const Tensor& gradient, int64_t& r) const;
  void
  choose_matrices(const GradientBucket& bucket, Reduction& reduction) const;
  void
  send_exact(GradientBucket& bucket, const Group& group, Reduction& reduction);
  void send_p(GradientBucket& bucket, const Group& group, Reduction& reduction);
  void finish(GradientBucket& bucket, const Group& group, Reduction& reduction);
  Tensor first_q(const std::string& name, const Matrix& matrix) const;

  const PowerSgdOptions options_;
  int64_t iteration_ = 0;
  std::map<std::string, MatrixState> states_;
};

bool PowerSgd::compresses(const Tensor& gradient, int64_t& r) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t n = gradient.size(0);
  const int64_t m = gradient.numel() / n;
  r = std::min({options_.rank, n, m});
  return static_cast<double>((n + m) * r) * options_.min_compression <=
         static_cast<double>(n * m);
}

void PowerSgd::choose_matrices(
    const GradientBucket& bucket, Reduction& reduction) const {
  for (size_t slot = 0; slot < bucket.gradients.size(); ++slot) {
    const Tensor& gradient = bucket.gradients[slot];
    int64_t r = 0;
    if (!compresses(gradient, r)) {
      reduction.exact_slots.push_back(slot);
      continue;
    }
    const int64_t n = gradient.size(0);
    reduction.matrices.push_back(
        {.slot = slot, .n = n, .m = gradient.numel() / n, .r = r});
  }
}

void PowerSgd::send_exact(
    GradientBucket& bucket, const Group& group, Reduction& reduction) {
  if (reduction.exact_slots.empty()) return;
  std::vector<Tensor> parts;
  for (const size_t slot : reduction.exact_slots) {
    parts.push_back(bucket.gradients[slot].reshape({-1}));
  }
  reduction.exact = torch::cat(parts);
  reduction.exact_work = group.all_reduce(
      reduction.exact, ReduceOp::sum,
      {.label = bucket.label + " uncompressed", .async = true});
}

Tensor PowerSgd::first_q(const std::string& name, const Matrix& matrix) const {
  const uint64_t step = options_.warm_start ? 0 : iteration_;
  auto generator = at::detail::createCPUGenerator(
      options_.seed ^ name_hash(name) ^ (step * 0x9E3779B97F4A7C15ull));
  const Tensor q =
      torch::empty({matrix.m, matrix.r}, torch::TensorOptions(torch::kFloat64));
  q.normal_(0.0, 1.0, generator);
  return q;
}

// Computes P = M Q and sends it, for all matrices of the bucket in one message.
void PowerSgd::send_p(
    GradientBucket& bucket, const Group& group, Reduction& reduction) {
  if (reduction.matrices.empty()) return;
  int64_t p_numel = 0, q_numel = 0;
  for (const auto& matrix : reduction.matrices) {
    p_numel += matrix.n * matrix.r;
    q_numel += matrix.m * matrix.r;
  }
  reduction.p = torch::empty({p_numel}, bucket.flat.options());
  reduction.q = torch::empty({q_numel}, bucket.flat.options());
  int64_t p_at = 0, q_at = 0;
  for (auto& matrix : reduction.matrices) {
    const int64_t p_size = matrix.n * matrix.r, q_size = matrix.m * matrix.r;
    matrix.p = reduction.p.narrow(0, p_at, p_size).view({matrix.n, matrix.r});
    matrix.q = reduction.q.narrow(0, q_at, q_size).view({matrix.m, matrix.r});
    p_at += p_size;
    q_at += q_size;
    const std::string& name = bucket.names[matrix.slot];
    MatrixState& state = states_[name];
    matrix.value = bucket.gradients[matrix.slot].reshape({matrix.n, matrix.m});
    if (options_.error_feedback && state.error.defined()) {
      matrix.value = matrix.value + state.error;
    }
    const bool warm = options_.warm_start && state.q.defined();
    matrix.q.copy_(warm ? state.q : first_q(name, matrix));
    at::mm_out(matrix.p, matrix.value, matrix.q);
  }
  reduction.p_work = group.all_reduce(
      reduction.p, ReduceOp::sum,
      {.label = bucket.label + " P", .async = true});
}

// Replaces the columns by an orthonormal basis of them. QR, in single precision
// at least, finds one even when the columns are linearly dependent.
void orthonormalise(Tensor& p) {
  const bool half = p.element_size() < 4;
  const Tensor in = half ? p.to(torch::kFloat32) : p;
  p.copy_(std::get<0>(at::linalg_qr(in, "reduced")));
}

void PowerSgd::finish(
    GradientBucket& bucket, const Group& group, Reduction& reduction) {
  const auto divisor = static_cast<double>(bucket.divisor);
  if (!reduction.matrices.empty()) {
    reduction.p_work.wait();
    for (auto& matrix : reduction.matrices) {
      orthonormalise(matrix.p);
      at::mm_out(matrix.q, matrix.value.t(), matrix.p);
    }
    group.all_reduce(reduction.q, ReduceOp::sum, {.label = bucket.label + " Q"})
        .wait();
    reduction.q.div_(divisor);
    for (const auto& matrix : reduction.matrices) {
      const Tensor mean = at::mm(matrix.p, matrix.q.t());
      MatrixState& state = states_[bucket.names[matrix.slot]];
      if (options_.error_feedback) state.error = matrix.value - mean;
      if (options_.warm_start) state.q = matrix.q.clone();
      Tensor gradient = bucket.gradients[matrix.slot];
      gradient.copy_(mean.view(gradient.sizes()));
    }
  }
  if (reduction.exact_slots.empty()) return;
  reduction.exact_work.wait();
  reduction.exact.div_(divisor);
  int64_t at = 0;
  for (const size_t slot : reduction.exact_slots) {
    Tensor gradient = bucket.gradients[slot];
    gradient.copy_(
        reduction.exact.narrow(0, at, gradient.numel()).view(gradient.sizes()));
    at += gradient.numel();
  }
}

BucketCompletion PowerSgd::start(GradientBucket& bucket, const Group& group) {
  const bool compress = iteration_ >= options_.start_iteration;
  BucketCompletion completion;
  if (compress) {
    auto reduction = std::make_shared<Reduction>();
    choose_matrices(bucket, *reduction);
    send_p(bucket, group, *reduction);
    send_exact(bucket, group, *reduction);
    completion = [self = shared_from_this(), &bucket, group, reduction] {
      self->finish(bucket, group, *reduction);
    };
  } else {
    completion = exact(bucket, group);
  }
  if (bucket.last) ++iteration_;
  return completion;
}

}  // namespace

BucketHook powersgd_hook(const PowerSgdOptions& options) {
  return [state = std::make_shared<PowerSgd>(options)](
             GradientBucket& bucket, const Group& group) {
    return state->start(bucket, group);
  };
}

}  // namespace echelon
