// The text that NVRTC compiles for GPUs, compiled for the host.
#include "echelon/kernels/norm.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "echelon/layers/computing_device.h"
#include "tests/kernels/host_kernels.h"
#include "tests/kernels/nvcc.h"

namespace echelon::host_kernels {
#include "echelon/kernels/norm.cu"
}  // namespace echelon::host_kernels

namespace echelon::norm_kernel_test {

namespace host = host_kernels;
using torch::Tensor;

static_assert(host::kNormThreads == kernels::kNormThreads);
static_assert(host::kNormValues<8> == kernels::kNormValues);
static_assert(host::kNormValues<1> == kernels::kSingleNormValues);
static_assert(host::kNormGroup == kernels::kNormGroup);
static_assert(host::kNormCounters == kernels::kNormCounters);

constexpr double kEps = 1e-5;

double rounding_of(torch::Dtype dtype) {
  return dtype == torch::kFloat32    ? 1e-5
         : dtype == torch::kBFloat16 ? 4e-3
                                     : 1e-3;
}

// `scale`: of what the terms of a sum are made of.
void expect_near(
    const Tensor& found, const Tensor& exact, const std::string& what,
    double scale = 1) {
  const double rounding = rounding_of(found.scalar_type());
  EXPECT_TRUE(
      torch::allclose(found.to(torch::kFloat64), exact, rounding, scale * 1e-5))
      << what << "\n"
      << (found.to(torch::kFloat64) - exact).abs().max();
}

template <class T>
const T* of(const Tensor& x) {
  return x.defined() ? static_cast<const T*>(x.const_data_ptr()) : nullptr;
}
template <class T>
T* to(const Tensor& x) {
  return x.defined() ? static_cast<T*>(x.data_ptr()) : nullptr;
}

struct Case {
  int64_t rows, width;
  int threads;
  int64_t blocks;
  int64_t offset = 0;  // of each tensor, in elements
  bool adds = true;
  bool with_mean = true;
};

Tensor empty_at(const Tensor& like, int64_t offset, double value = 7) {
  return torch::full({like.numel() + offset}, value, like.options())
      .narrow(0, offset, like.numel())
      .view(like.sizes());
}
Tensor placed(const Tensor& x, int64_t offset) {
  const auto there = empty_at(x, offset);
  there.copy_(x);
  return there;
}

// All results of both directions.
template <class T, int K, bool kMean>
std::vector<Tensor> run(const Case& one, const std::vector<Tensor>& in) {
  const auto &x = in[0], &added = in[1], &weight = in[2], &bias = in[3],
             &gradient = in[4], &passed = in[5];
  const int64_t count = kMean ? 2 : 1;
  const auto numbers = torch::dtype(torch::kFloat32);
  const auto out = empty_at(x, one.offset);
  const auto sum = added.defined() ? empty_at(x, one.offset) : Tensor();
  const auto statistics =
      torch::full({count, one.rows + kernels::kNormCounters}, 7, numbers);
  host::launch(one.rows, one.threads, [&] {
    host::norm<T, K, kMean>(
        of<T>(x), of<T>(added), of<T>(weight), of<T>(bias), to<T>(sum),
        to<T>(out), to<float>(statistics), one.rows, one.width,
        static_cast<float>(kEps));
  });
  const auto counters = statistics[0].narrow(0, one.rows, host::kNormCounters);
  // The gradients to the sum and to the parameters.
  const auto gradients = [&](bool for_parameters, host::BlockOrder order) {
    const auto for_sum = empty_at(x, one.offset);
    const auto partial =
        for_parameters ? torch::full({count, one.blocks, one.width}, 7, numbers)
                       : Tensor();
    const auto parameters = torch::full({count, one.width}, 7, x.options());
    host::launch(
        one.blocks, one.threads,
        [&] {
          host::norm_gradient<T, K, kMean>(
              of<T>(gradient), of<T>(passed), of<T>(sum.defined() ? sum : x),
              of<T>(weight), to<float>(statistics), to<T>(for_sum),
              to<float>(partial), to<T>(parameters), one.rows, one.width,
              one.blocks);
        },
        order);
    EXPECT_TRUE(counters.eq(0).all().template item<bool>());
    return std::pair(for_sum, parameters);
  };
  const auto [for_sum, parameters] =
      gradients(true, host::BlockOrder::forwards);
  // Whichever block is the last, and a second time: the same bits.
  const auto again = gradients(true, host::BlockOrder::backwards);
  EXPECT_TRUE(again.first.equal(for_sum));
  EXPECT_TRUE(again.second.equal(parameters));
  // Without parameters: the same, and nothing else is written.
  const auto alone = gradients(false, host::BlockOrder::forwards);
  EXPECT_TRUE(alone.first.equal(for_sum));
  EXPECT_TRUE(alone.second.eq(7).all().template item<bool>());
  return {out, sum, for_sum, parameters, statistics};
}

std::vector<Tensor> exact_of(const Case& one, const std::vector<Tensor>& in) {
  const auto wide = [](const Tensor& x) {
    return x.defined() ? x.to(torch::kFloat64) : x;
  };
  const auto sum = in[1].defined() ? (in[0] + in[1]) : in[0];
  auto x = wide(sum).requires_grad_();
  auto weight = wide(in[2]).requires_grad_();
  auto bias = one.with_mean ? wide(in[3]).requires_grad_() : Tensor();
  const auto mean = one.with_mean ? x.mean({-1}, true) : torch::zeros({1});
  const auto centred = x - mean;
  auto y =
      centred * (centred.square().mean({-1}, true) + kEps).rsqrt() * weight;
  if (one.with_mean) y = y + bias;
  (y * wide(in[4])).sum().backward();
  auto for_sum = x.grad();
  if (in[5].defined()) for_sum = for_sum + wide(in[5]);
  auto parameters = weight.grad().unsqueeze(0);
  if (one.with_mean) parameters = torch::stack({weight.grad(), bias.grad()});
  return {y.detach(), sum, for_sum, parameters};
}

template <class T, int K>
void compare(torch::Dtype dtype, const Case& one) {
  SCOPED_TRACE(
      std::string(torch::toString(dtype)) + ", " + std::to_string(one.rows) +
      " x " + std::to_string(one.width) + " from " +
      std::to_string(one.offset) + (one.with_mean ? ", layer" : ", rms") +
      (one.adds ? ", added" : ""));
  torch::manual_seed(1);
  const auto make = [&](at::IntArrayRef sizes, double mean = 0) {
    return placed((torch::randn(sizes) + mean).to(dtype), one.offset);
  };
  const std::vector<int64_t> sizes = {one.rows, one.width};
  const std::vector<Tensor> in = {
      make(sizes, 2),       one.adds ? make(sizes) : Tensor(),
      make({one.width}, 1), one.with_mean ? make({one.width}) : Tensor(),
      make(sizes),          one.adds ? make(sizes) : Tensor()};
  const auto found =
      one.with_mean ? run<T, K, true>(one, in) : run<T, K, false>(one, in);
  const auto exact = exact_of(one, in);
  expect_near(found[0], exact[0], "norm", 3);
  if (one.adds) {
    EXPECT_TRUE(found[1].equal(exact[1]));
  }
  expect_near(found[2], exact[2], "gradient to the sum", 10);
  expect_near(found[3], exact[3], "gradients of parameters", 10);
}

template <class Body>
void for_dtypes(const Body& body) {
  body(torch::kFloat32, float());
  body(torch::kBFloat16, host::BFloat16());
  body(torch::kHalf, host::Half());
}

TEST(NormKernels, ComputeWhatFloat64DoesForEveryWidthAndAlignment) {
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    for (const bool with_mean : {false, true}) {
      for (const bool adds : {false, true}) {
        // Odd widths, at any element; the widest of 4 threads.
        compare<T, 1>(dtype, {2, 1, 4, 1, 0, adds, with_mean});
        compare<T, 1>(dtype, {3, 5, 4, 2, 3, adds, with_mean});
        compare<T, 1>(dtype, {3, 32, 4, 2, 1, adds, with_mean});
        // In packets of 16 bytes.
        constexpr int kPacket = 16 / sizeof(T);
        for (const int64_t width : {40, 64}) {
          compare<T, kPacket>(dtype, {5, width, 4, 2, 0, adds, with_mean});
        }
      }
    }
  });
}

TEST(NormKernels, OfOneRowAndOfMoreBlocksThanRows) {
  compare<float, 4>(torch::kFloat32, {1, 48, 4, 1});
  compare<host::BFloat16, 8>(torch::kBFloat16, {2, 48, 4, 5});
}

// Whole groups of blocks, one more, and one of one block.
TEST(NormKernels, BlocksAreAddedUpInGroups) {
  for (const int64_t blocks :
       {host::kNormGroup, 2 * host::kNormGroup + 1, 2 * host::kNormGroup + 7}) {
    for (const bool with_mean : {false, true}) {
      compare<float, 1>(
          torch::kFloat32, {2 * blocks + 3, 7, 2, blocks, 0, true, with_mean});
      compare<host::BFloat16, 8>(
          torch::kBFloat16, {blocks, 40, 4, blocks, 0, true, with_mean});
    }
  }
}

// Numbers far from zero keep their deviation.
TEST(NormKernels, ALargeMeanLosesNoDigits) {
  torch::manual_seed(2);
  const Case one{2, 64, 8, 1, 0, false, true};
  const std::vector<Tensor> in = {torch::randn({2, 64}) + 1000,
                                  Tensor(),
                                  torch::ones({64}),
                                  torch::zeros({64}),
                                  torch::randn({2, 64}),
                                  Tensor()};
  const auto found = run<float, 4, true>(one, in);
  const auto exact = exact_of(one, in);
  EXPECT_LT(
      (found[0].to(torch::kFloat64) - exact[0]).abs().max().item<double>(),
      1e-3);
}

// The last row of a tensor of more than 2^32 elements.
TEST(NormKernels, IndexMoreElementsThan32BitsDo) {
  torch::manual_seed(3);
  const Case one{1, 2048, 128, 1};
  const std::vector<Tensor> in = {
      torch::randn({1, 2048}) + 2, torch::randn({1, 2048}),
      torch::randn({2048}) + 1,    torch::randn({2048}),
      torch::randn({1, 2048}),     torch::randn({1, 2048})};
  const auto expected = run<float, 4, true>(one, in);
  const int64_t row = (int64_t{1} << 21) + 7, rows = row + 1;
  const auto begin = [&](const Tensor& x) {
    return host::begin_of_huge(to<float>(x), row * one.width);
  };
  const auto sum = torch::zeros_like(in[0]), out = torch::zeros_like(in[0]),
             for_sum = torch::zeros_like(in[0]);
  const auto statistics = torch::empty({2, rows + kernels::kNormCounters});
  host::launch_block(row, one.threads, [&] {
    host::norm<float, 4, true>(
        begin(in[0]), begin(in[1]), of<float>(in[2]), of<float>(in[3]),
        begin(sum), begin(out), to<float>(statistics), rows, one.width,
        static_cast<float>(kEps));
  });
  host::launch_block(row, one.threads, [&] {
    host::norm_gradient<float, 4, true>(
        begin(in[4]), begin(in[5]), begin(sum), of<float>(in[2]),
        to<float>(statistics), begin(for_sum), nullptr, nullptr, rows,
        one.width, rows);
  });
  EXPECT_TRUE(out.equal(expected[0]));
  EXPECT_TRUE(sum.equal(expected[1]));
  EXPECT_TRUE(for_sum.equal(expected[2]));
  EXPECT_TRUE(statistics.select(1, row).equal(expected[4].select(1, 0)));
}

// On meta tensors that stand for a GPU's, shapes and nothing else.
TEST(NormKernels, GiveShapesOfMetaTensors) {
  const auto low = torch::dtype(torch::kBFloat16).device(torch::kMeta);
  const auto x = torch::empty({2, 3, 64}, low);
  const auto weight = torch::empty({64}, low);
  EXPECT_FALSE(kernels::takes_norm(x, weight));  // it stands for a CPU's
  const CountedFor cuda(torch::kCUDA);
  EXPECT_TRUE(kernels::takes_norm(x, weight));
  EXPECT_FALSE(kernels::takes_norm(x, weight.to(torch::kFloat32)));
  EXPECT_FALSE(
      kernels::takes_norm(x.to(torch::kFloat64), weight.to(torch::kFloat64)));
  const auto wide = [&](int64_t width) {
    return kernels::takes_norm(
        torch::empty({3, width}, low), torch::empty({width}, low));
  };
  EXPECT_TRUE(wide(8192));
  EXPECT_FALSE(wide(8200));
  EXPECT_TRUE(wide(4095));
  EXPECT_FALSE(wide(4097));
  EXPECT_FALSE(wide(0));
  const auto found = kernels::residual_norm(x, x, weight, weight, kEps);
  EXPECT_EQ(found.norm.sizes(), x.sizes());
  EXPECT_EQ(found.sum.scalar_type(), torch::kBFloat16);
  const int64_t rows = 6 + kernels::kNormCounters;
  EXPECT_EQ(found.statistics.sizes(), (std::vector<int64_t>{2, rows}));
  EXPECT_EQ(found.statistics.scalar_type(), torch::kFloat32);
  const auto alone = kernels::residual_norm(x, {}, weight, {}, kEps);
  EXPECT_FALSE(alone.sum.defined());
  EXPECT_EQ(alone.statistics.sizes(), (std::vector<int64_t>{1, rows}));
  const auto gradient =
      kernels::residual_norm_gradient(x, {}, x, weight, found.statistics, true);
  EXPECT_EQ(gradient.sum.sizes(), x.sizes());
  EXPECT_EQ(gradient.parameters.sizes(), (std::vector<int64_t>{2, 64}));
  EXPECT_FALSE(
      kernels::residual_norm_gradient(x, x, x, weight, found.statistics, false)
          .parameters.defined());
}

// With CUDA's compiler, where there is one.
TEST(NormKernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("norm.cu", kernels::kNormThreads);
}

}  // namespace echelon::norm_kernel_test
