// The text that NVRTC compiles for GPUs, compiled for the host.
#include "echelon/kernels/vocab_loss.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "echelon/layers/computing_device.h"
#include "tests/kernels/host_kernels.h"
#include "tests/kernels/nvcc.h"

namespace echelon::host_kernels {
#include "echelon/kernels/vocab_loss.cu"
}  // namespace echelon::host_kernels

namespace echelon::vocab_loss_kernel_test {

namespace host = host_kernels;
using torch::Tensor;

static_assert(host::kThreads == kernels::kVocabLossThreads);

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Logits of one dtype, some elements apart, and a target for each row.
struct Case {
  torch::Dtype dtype;
  int64_t rows, width, stride, offset;  // offset: of the first, in elements
  int threads;
};

template <class T>
void run_kernels(
    const Case& one, const Tensor& logits, const Tensor& ids,
    const Tensor& sums, const Tensor& total, const Tensor& scale,
    const Tensor& gradient) {
  const auto* rows = static_cast<const T*>(logits.const_data_ptr());
  const auto* targets =
      reinterpret_cast<const long long*>(ids.const_data_ptr<int64_t>());
  host::launch(one.rows, one.threads, [&] {
    host::vocab_sums(
        rows, targets, sums.data_ptr<float>(), one.rows, one.width,
        logits.stride(0));
  });
  if (!gradient.defined()) return;
  host::launch(one.rows, one.threads, [&] {
    host::vocab_gradient(
        rows, targets, total.const_data_ptr<float>(),
        scale.const_data_ptr<float>(), static_cast<T*>(gradient.data_ptr()),
        one.width, logits.stride(0), gradient.stride(0));
  });
}

void run_kernels_of(
    const Case& one, const Tensor& logits, const Tensor& ids,
    const Tensor& sums, const Tensor& total = {}, const Tensor& scale = {},
    const Tensor& gradient = {}) {
  const auto run = one.dtype == torch::kFloat32    ? run_kernels<float>
                   : one.dtype == torch::kBFloat16 ? run_kernels<host::BFloat16>
                                                   : run_kernels<host::Half>;
  run(one, logits, ids, sums, total, scale, gradient);
}

void compare(const Case& one) {
  torch::manual_seed(1);
  const auto place =
      torch::randn({one.offset + one.rows * one.stride}).mul(5).to(one.dtype);
  const auto logits =
      place.as_strided({one.rows, one.width}, {one.stride, 1}, one.offset);
  auto ids = torch::arange(one.rows) * 3 % one.width;
  ids[0] = -100;  // no target here
  const auto exact = logits.to(torch::kFloat64);
  const auto sums = torch::full({3, one.rows}, -1, torch::kFloat32);
  const auto total = exact.logsumexp(1).to(torch::kFloat32);
  const auto scale = torch::rand({one.rows});
  // What is behind each row is not the kernel's.
  const auto whole = torch::full({one.rows, one.width + 3}, 7, one.dtype);
  const auto gradient = whole.narrow(1, 0, one.width);
  run_kernels_of(one, logits, ids, sums, total, scale, gradient);

  const auto most = exact.amax({1});
  const auto sum = (exact - most.unsqueeze(1)).exp().sum(1);
  auto target = exact.gather(1, ids.clamp_min(0).unsqueeze(1)).squeeze(1);
  target[0] = 0;
  EXPECT_TRUE(sums[0].to(torch::kFloat64).equal(most));
  EXPECT_TRUE(torch::allclose(sums[1].to(torch::kFloat64), sum, 1e-5));
  EXPECT_TRUE(sums[2].to(torch::kFloat64).equal(target));

  auto expected = (exact - total.unsqueeze(1)).exp();
  for (int64_t r = 1; r < one.rows; ++r) expected[r][ids[r]] -= 1;
  expected *= scale.unsqueeze(1);
  const double rounding = one.dtype == torch::kFloat32    ? 1e-5
                          : one.dtype == torch::kBFloat16 ? 4e-3
                                                          : 1e-3;
  EXPECT_TRUE(
      torch::allclose(gradient.to(torch::kFloat64), expected, rounding, 1e-7));
  EXPECT_TRUE(whole.narrow(1, one.width, 3).eq(7).all().item<bool>());
}

TEST(VocabLossKernels, ComputeWhatFloat64DoesForEveryWidthAndAlignment) {
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
    for (const int64_t width : {1, 5, 8, 64, 131, 1000}) {
      for (const int64_t offset : {0, 3}) {
        for (const int64_t room : {0, 1, 7}) {
          SCOPED_TRACE(
              std::string(torch::toString(dtype)) + ", width " +
              std::to_string(width) + " from " + std::to_string(offset) +
              ", room " + std::to_string(room));
          compare({dtype, 3, width, width + room, offset, 4});
        }
      }
    }
  }
  compare({torch::kBFloat16, 2, 5000, 5056, 0, 32});
}

TEST(VocabLossKernels, InfinitiesAndNaN) {
  auto logits = torch::zeros({4, 40});
  logits[0].fill_(-kInfinity);
  logits[1][7] = -kInfinity;
  logits[2][9] = std::nan("");
  logits[3][11] = kInfinity;
  const auto sums = torch::zeros({3, 4});
  run_kernels_of(
      {torch::kFloat32, 4, 40, 40, 0, 8}, logits,
      torch::zeros({4}, torch::kInt64), sums);
  EXPECT_EQ(sums[0][0].item<double>(), -kInfinity);
  EXPECT_EQ(sums[1][0].item<double>(), 0);
  EXPECT_EQ(sums[1][1].item<double>(), 39);
  EXPECT_TRUE(std::isnan(sums[1][2].item<double>()));
  EXPECT_TRUE(std::isnan(sums[1][3].item<double>()));
}

TEST(VocabLossKernels, BFloat16RoundsToTheNearest) {
  for (const float x :
       {1.00390625F, 1.01171875F, 1.0F, -3.1415927F, 1e-40F, 3.4e38F,
        std::numeric_limits<float>::infinity()}) {
    host::BFloat16 stored;
    host::store(stored, x);
    EXPECT_EQ(stored.bits, c10::BFloat16(x).x) << x;
  }
  host::BFloat16 stored;
  host::store(stored, std::nanf(""));
  EXPECT_TRUE(std::isnan(host::to_float(stored)));
}

// The last row of logits of more than 2^32 elements.
TEST(VocabLossKernels, IndexMoreElementsThan32BitsDo) {
  torch::manual_seed(2);
  const int64_t row = (int64_t{1} << 21) + 7, width = 2048;
  const auto logits = torch::randn({1, width}),
             sums = torch::empty({3, row + 1}),
             gradient = torch::zeros({1, width}), scale = torch::rand({1});
  const auto ids = torch::tensor({int64_t{5}}, torch::kInt64);
  const auto total = logits.logsumexp(1);
  const auto expected_sums = torch::zeros({3, 1}),
             expected = torch::zeros({1, width});
  run_kernels<float>(
      {torch::kFloat32, 1, width, width, 0, 8}, logits, ids, expected_sums,
      total, scale, expected);
  const auto* rows =
      host::begin_of_huge(logits.const_data_ptr<float>(), row * width);
  const auto* targets = host::begin_of_huge(
      reinterpret_cast<const long long*>(ids.const_data_ptr<int64_t>()), row);
  host::launch_block(row, 8, [&] {
    host::vocab_sums(
        rows, targets, sums.data_ptr<float>(), row + 1, width, width);
  });
  host::launch_block(row, 8, [&] {
    host::vocab_gradient(
        rows, targets, host::begin_of_huge(total.const_data_ptr<float>(), row),
        host::begin_of_huge(scale.const_data_ptr<float>(), row),
        host::begin_of_huge(gradient.data_ptr<float>(), row * width), width,
        width, width);
  });
  EXPECT_TRUE(sums.select(1, row).equal(expected_sums.select(1, 0)));
  EXPECT_TRUE(gradient.equal(expected));
}

// On meta tensors that stand for a GPU's, shapes and nothing else.
TEST(VocabLossKernels, GiveShapesOfMetaTensors) {
  const auto rows =
      torch::empty({6, 64}, torch::dtype(torch::kBFloat16).device(torch::kMeta))
          .narrow(1, 0, 50);
  EXPECT_FALSE(kernels::takes(rows));  // it stands for a CPU's
  const CountedFor cuda(torch::kCUDA);
  EXPECT_TRUE(kernels::takes(rows));
  EXPECT_FALSE(kernels::takes(rows.to(torch::kFloat64)));
  const auto numbers = torch::empty({6}, torch::device(torch::kMeta));
  const auto ids = numbers.to(torch::kInt64);
  const auto sums = kernels::vocab_sums(rows, ids);
  EXPECT_EQ(sums.sizes(), (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(sums.scalar_type(), torch::kFloat32);
  const auto gradient = kernels::vocab_gradient(rows, ids, numbers, numbers);
  EXPECT_EQ(gradient.sizes(), rows.sizes());
  EXPECT_EQ(gradient.strides(), rows.strides());
  EXPECT_EQ(gradient.scalar_type(), torch::kBFloat16);
}

// With CUDA's compiler, where there is one.
TEST(VocabLossKernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("vocab_loss.cu", kernels::kVocabLossThreads);
}

}  // namespace echelon::vocab_loss_kernel_test
