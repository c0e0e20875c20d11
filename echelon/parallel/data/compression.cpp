#include "echelon/parallel/data/compression.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using torch::Tensor;

BucketCompletion exact(GradientBucket& bucket, const Group& group) {
  const bool everybody = bucket.divisor == group.size();
  const Work work = group.all_reduce(
      bucket.flat, everybody ? ReduceOp::avg : ReduceOp::sum,
      {.label = bucket.label, .async = true});
  return [work, everybody, &bucket] {
    work.wait();
    if (!everybody) bucket.flat.div_(static_cast<double>(bucket.divisor));
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

// Shapes of one compressed gradient: n rows, m columns, r of the factors.
struct Matrix {
  size_t slot = 0;  // in the bucket
  int64_t n = 0, m = 0, r = 0;
  Tensor value{};  // [n, m] the gradient, with the error fed back
  Tensor p{};      // [n, r] view of the flat factors that are sent
  Tensor q{};      // [m, r]
};

// Kept from step to step, by the parameter's name: buckets may be cut anew.
struct Memory {
  Tensor error;  // [n, m]
  Tensor q;      // [m, r]
};

class PowerSgd : public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(const PowerSgdOptions& options) : options_(options) {
    if (options.rank < 1) {
      throw ConfigError(
          "[powersgd] rank=" + std::to_string(options.rank) +
          "; the rank of the approximation is at least 1");
    }
  }

  BucketCompletion start(GradientBucket& bucket, const Group& group);

 private:
  // What one bucket has under way.
  struct Flight {
    std::vector<Matrix> matrices;
    std::vector<size_t> exact_slots;
    Tensor exact, p, q;  // flat
    Work exact_work, p_work;
  };

  bool compresses(const Tensor& gradient, int64_t& r) const;
  void sort_out(const GradientBucket& bucket, Flight& flight) const;
  void send_exact(GradientBucket& bucket, const Group& group, Flight& flight);
  void send_p(GradientBucket& bucket, const Group& group, Flight& flight);
  void finish(GradientBucket& bucket, const Group& group, Flight& flight);
  Tensor first_q(const std::string& name, const Matrix& matrix) const;

  const PowerSgdOptions options_;
  int64_t iteration_ = 0;
  std::map<std::string, Memory> memory_;
};

bool PowerSgd::compresses(const Tensor& gradient, int64_t& r) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t n = gradient.size(0);
  const int64_t m = gradient.numel() / n;
  r = std::min({options_.rank, n, m});
  return static_cast<double>((n + m) * r) * options_.min_compression <=
         static_cast<double>(n * m);
}

void PowerSgd::sort_out(const GradientBucket& bucket, Flight& flight) const {
  for (size_t slot = 0; slot < bucket.gradients.size(); ++slot) {
    const Tensor& gradient = bucket.gradients[slot];
    int64_t r = 0;
    if (!compresses(gradient, r)) {
      flight.exact_slots.push_back(slot);
      continue;
    }
    const int64_t n = gradient.size(0);
    flight.matrices.push_back(
        {.slot = slot, .n = n, .m = gradient.numel() / n, .r = r});
  }
}

void PowerSgd::send_exact(
    GradientBucket& bucket, const Group& group, Flight& flight) {
  if (flight.exact_slots.empty()) return;
  std::vector<Tensor> parts;
  for (const size_t slot : flight.exact_slots) {
    parts.push_back(bucket.gradients[slot].reshape({-1}));
  }
  flight.exact = torch::cat(parts);
  flight.exact_work = group.all_reduce(
      flight.exact, ReduceOp::sum,
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

// P = M Q, for all matrices of the bucket in one message.
void PowerSgd::send_p(
    GradientBucket& bucket, const Group& group, Flight& flight) {
  if (flight.matrices.empty()) return;
  int64_t p_numel = 0, q_numel = 0;
  for (const auto& matrix : flight.matrices) {
    p_numel += matrix.n * matrix.r;
    q_numel += matrix.m * matrix.r;
  }
  flight.p = torch::empty({p_numel}, bucket.flat.options());
  flight.q = torch::empty({q_numel}, bucket.flat.options());
  int64_t p_at = 0, q_at = 0;
  for (auto& matrix : flight.matrices) {
    const int64_t p_size = matrix.n * matrix.r, q_size = matrix.m * matrix.r;
    matrix.p = flight.p.narrow(0, p_at, p_size).view({matrix.n, matrix.r});
    matrix.q = flight.q.narrow(0, q_at, q_size).view({matrix.m, matrix.r});
    p_at += p_size;
    q_at += q_size;
    const std::string& name = bucket.names[matrix.slot];
    Memory& memory = memory_[name];
    matrix.value = bucket.gradients[matrix.slot].reshape({matrix.n, matrix.m});
    if (options_.error_feedback && memory.error.defined()) {
      matrix.value = matrix.value + memory.error;
    }
    const bool warm = options_.warm_start && memory.q.defined();
    matrix.q.copy_(warm ? memory.q : first_q(name, matrix));
    at::mm_out(matrix.p, matrix.value, matrix.q);
  }
  flight.p_work = group.all_reduce(
      flight.p, ReduceOp::sum, {.label = bucket.label + " P", .async = true});
}

// An orthonormal basis of the columns. QR, in single precision at least, also
// gives one when the columns depend on each other.
void orthonormalise(Tensor& p) {
  const bool half = p.element_size() < 4;
  const Tensor in = half ? p.to(torch::kFloat32) : p;
  p.copy_(std::get<0>(at::linalg_qr(in, "reduced")));
}

void PowerSgd::finish(
    GradientBucket& bucket, const Group& group, Flight& flight) {
  const auto divisor = static_cast<double>(bucket.divisor);
  if (!flight.matrices.empty()) {
    flight.p_work.wait();
    for (auto& matrix : flight.matrices) {
      orthonormalise(matrix.p);
      at::mm_out(matrix.q, matrix.value.t(), matrix.p);
    }
    group.all_reduce(flight.q, ReduceOp::sum, {.label = bucket.label + " Q"})
        .wait();
    flight.q.div_(divisor);
    for (const auto& matrix : flight.matrices) {
      const Tensor mean = at::mm(matrix.p, matrix.q.t());
      Memory& memory = memory_[bucket.names[matrix.slot]];
      if (options_.error_feedback) memory.error = matrix.value - mean;
      if (options_.warm_start) memory.q = matrix.q.clone();
      Tensor gradient = bucket.gradients[matrix.slot];
      gradient.copy_(mean.view(gradient.sizes()));
    }
  }
  if (flight.exact_slots.empty()) return;
  flight.exact_work.wait();
  flight.exact.div_(divisor);
  int64_t at = 0;
  for (const size_t slot : flight.exact_slots) {
    Tensor gradient = bucket.gradients[slot];
    gradient.copy_(
        flight.exact.narrow(0, at, gradient.numel()).view(gradient.sizes()));
    at += gradient.numel();
  }
}

BucketCompletion PowerSgd::start(GradientBucket& bucket, const Group& group) {
  const bool compress = iteration_ >= options_.start_iteration;
  BucketCompletion completion;
  if (compress) {
    auto flight = std::make_shared<Flight>();
    sort_out(bucket, *flight);
    send_p(bucket, group, *flight);
    send_exact(bucket, group, *flight);
    completion = [self = shared_from_this(), &bucket, group, flight] {
      self->finish(bucket, group, *flight);
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
