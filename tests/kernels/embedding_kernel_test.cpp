// The text that NVRTC compiles for GPUs, compiled for the host.
#include "echelon/kernels/embedding.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "echelon/layers/computing_device.h"
#include "tests/kernels/host_kernels.h"
#include "tests/kernels/nvcc.h"

namespace echelon::host_kernels {
#include "echelon/kernels/embedding.cu"
}  // namespace echelon::host_kernels

namespace echelon::embedding_kernel_test {

namespace host = host_kernels;
using torch::Tensor;

static_assert(host::kTokenChunk == kernels::kTokenChunk);

template <class T>
const T* of(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
const long long* integers(const Tensor& x) {
  return reinterpret_cast<const long long*>(x.const_data_ptr<int64_t>());
}

// The rows of the table, with some behind them that are not the kernels'.
template <class T, int K>
Tensor
run(const Tensor& gradient, const Tensor& ids, int64_t rows, int64_t padding,
    int threads = 4) {
  const int64_t width = gradient.size(-1);
  const auto tokens = kernels::sort_tokens(ids, rows);
  const int64_t chunks = ids.numel() / kernels::kTokenChunk;
  const auto partial = torch::full({chunks, width}, NAN);
  const auto room = torch::full({rows + 1, width}, 7, gradient.options());
  host::launch_in_turn(chunks, threads, [&] {
    host::sum_chunks<T, K>(
        of<T>(gradient), integers(tokens.ids), integers(tokens.order),
        partial.data_ptr<float>(), width);
  });
  host::launch_in_turn(rows, threads, [&] {
    host::sum_rows<T, K>(
        of<T>(gradient), integers(tokens.order), integers(tokens.first),
        of<float>(partial), static_cast<T*>(room.data_ptr()), width, padding);
  });
  EXPECT_TRUE(room[rows].eq(7).all().template item<bool>());
  return room.narrow(0, 0, rows);
}

Tensor exact_of(
    const Tensor& gradient, const Tensor& ids, int64_t rows, int64_t padding) {
  const auto wide = gradient.to(torch::kFloat64);
  const auto inside = ids.ge(0).logical_and(ids.lt(rows)).nonzero().squeeze(1);
  auto sums = torch::zeros({rows, gradient.size(1)}, torch::kFloat64);
  sums.index_add_(0, ids.index_select(0, inside), wide.index_select(0, inside));
  if (padding >= 0) sums[padding].zero_();
  return sums;
}

template <class T, int K>
void compare(
    torch::Dtype dtype, const Tensor& ids, int64_t rows, int64_t width,
    int64_t padding = -1) {
  SCOPED_TRACE(
      std::string(torch::toString(dtype)) + ", " + std::to_string(ids.numel()) +
      " tokens, " + std::to_string(rows) + " x " + std::to_string(width));
  const auto gradient = torch::randn({ids.numel(), width}).to(dtype);
  const auto found = run<T, K>(gradient, ids, rows, padding);
  const auto exact = exact_of(gradient, ids, rows, padding);
  // Each sum is rounded once; float32's sums lose some digits on the way.
  const double rounding = dtype == torch::kFloat32    ? 1e-6
                          : dtype == torch::kBFloat16 ? 0x1p-8
                                                      : 0x1p-11;
  const double terms = static_cast<double>(ids.numel());
  EXPECT_TRUE(
      torch::allclose(found.to(torch::kFloat64), exact, rounding, 2e-7 * terms))
      << (found.to(torch::kFloat64) - exact).abs().max();
  EXPECT_TRUE(found.equal(run<T, K>(gradient, ids, rows, padding, 7)));
}

template <class Body>
void for_dtypes(const Body& body) {
  body(torch::kFloat32, float());
  body(torch::kBFloat16, host::BFloat16());
  body(torch::kHalf, host::Half());
}

// Some rows have no token, some one, some several chunks of them.
TEST(EmbeddingKernels, SumWhatFloat64Does) {
  torch::manual_seed(1);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    constexpr int kPacket = 16 / sizeof(T);
    const auto few = torch::randint(0, 40, {25}, torch::kInt64);
    const auto many = (torch::rand({700}).pow(4) * 30).to(torch::kInt64);
    for (const auto& ids : {few, many}) {
      compare<T, 1>(dtype, ids, 40, 5);
      compare<T, kPacket>(dtype, ids, 40, 3 * kPacket);
    }
  });
}

TEST(EmbeddingKernels, WriteZerosForThePaddingAndWithoutTokens) {
  torch::manual_seed(2);
  const auto ids = torch::randint(0, 9, {300}, torch::kInt64);
  compare<float, 4>(torch::kFloat32, ids, 9, 8, /*padding=*/4);
  compare<float, 1>(torch::kFloat32, ids.fill_(4), 9, 3, /*padding=*/4);
  compare<float, 4>(torch::kFloat32, ids.narrow(0, 0, 0), 9, 8);
}

// Those of other ranks' shards, before and after.
TEST(EmbeddingKernels, LeaveOutIdsOfOtherRows) {
  torch::manual_seed(3);
  for_dtypes([](torch::Dtype dtype, auto number) {
    const auto ids = torch::randint(-20, 40, {500}, torch::kInt64);
    compare<decltype(number), 1>(dtype, ids, 10, 6);
    compare<decltype(number), 1>(dtype, ids.to(torch::kInt32), 10, 6);
    compare<decltype(number), 1>(dtype, ids.clamp_max(-1), 10, 6);
    compare<decltype(number), 1>(dtype, ids.fill_(10), 10, 6);
  });
}

// One id has all tokens: whole chunks, one more, one less, from any place.
TEST(EmbeddingKernels, SumOneIdsTokensInChunks) {
  torch::manual_seed(4);
  constexpr int64_t kChunk = kernels::kTokenChunk;
  for (const int64_t before : {int64_t{0}, int64_t{1}, kChunk - 1, kChunk}) {
    for (const int64_t count :
         {int64_t{1}, kChunk - 1, kChunk, kChunk + 1, 2 * kChunk - 1,
          2 * kChunk, 5 * kChunk + 3}) {
      const auto ids = torch::cat(
          {torch::zeros({before}, torch::kInt64),
           torch::ones({count}, torch::kInt64),
           torch::full({3}, 2, torch::kInt64)});
      compare<host::BFloat16, 8>(
          torch::kBFloat16, ids.flip({0}).contiguous(), 4, 16);
    }
  }
}

// In 16 bits, a sum of many ones would stop at 256 or 2,048.
TEST(EmbeddingKernels, FrequentTokensDoNotStagnate) {
  const auto ids = torch::zeros({4096}, torch::kInt64);
  const auto gradient = torch::ones({4096, 8}, torch::kBFloat16);
  const auto found = run<host::BFloat16, 8>(gradient, ids, 1, -1);
  EXPECT_TRUE(found.eq(4096).all().item<bool>());
}

// A token whose row is behind the 2^31st element: it alone has memory.
TEST(EmbeddingKernels, IndexMoreElementsThan32BitsDo) {
  const int64_t width = 1 << 20, token = 5000;
  const auto row = torch::randn({width});
  const auto* all =
      host::begin_of_huge(row.const_data_ptr<float>(), token * width);
  const auto order = torch::tensor({token}, torch::kInt64);
  const auto first = torch::tensor({0, 1}, torch::kInt64);
  const auto out = torch::zeros({width});
  host::launch_in_turn(1, 4, [&] {
    host::sum_rows<float, 4>(
        all, integers(order), integers(first), nullptr, out.data_ptr<float>(),
        width, -1);
  });
  EXPECT_TRUE(out.equal(row));
}

// On meta tensors that stand for a GPU's, shapes and nothing else.
TEST(EmbeddingKernels, GiveShapesOfMetaTensors) {
  const auto gradient = torch::empty(
      {2, 3, 64}, torch::dtype(torch::kBFloat16).device(torch::kMeta));
  EXPECT_FALSE(kernels::takes_embedding(gradient));  // it stands for a CPU's
  const CountedFor cuda(torch::kCUDA);
  EXPECT_TRUE(kernels::takes_embedding(gradient));
  EXPECT_FALSE(kernels::takes_embedding(gradient.to(torch::kFloat64)));
  const auto ids =
      torch::empty({2, 3}, torch::dtype(torch::kInt64).device(torch::kMeta));
  const auto found = kernels::embedding_gradient(gradient, ids, 100);
  EXPECT_EQ(found.sizes(), (std::vector<int64_t>{100, 64}));
  EXPECT_EQ(found.scalar_type(), torch::kBFloat16);
}

// With CUDA's compiler, where there is one.
TEST(EmbeddingKernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("embedding.cu", host::kEmbeddingThreads);
}

}  // namespace echelon::embedding_kernel_test
