// The rounding of matrices to 8 bits, compiled for the host.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "echelon/kernels/fp8.h"
#include "echelon/layers/computing_device.h"
#include "tests/kernels/host_kernels.h"
#include "tests/kernels/nvcc.h"

namespace echelon::host_kernels {
#include "echelon/kernels/fp8.cu"
}  // namespace echelon::host_kernels

namespace echelon::fp8_kernel_test {

namespace host = host_kernels;
using torch::Tensor;

unsigned char bits_of(float x, torch::Dtype format) {
  return torch::full({}, x).to(format).view(torch::kUInt8).item<uint8_t>();
}

// Every number of either format, what lies half way between two, and its
// neighbours.
TEST(Fp8Kernels, RoundAsLibTorchDoes) {
  for (int sign : {1, -1}) {
    for (int bits = 0; bits < 128; ++bits) {
      for (const auto format : {torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
        const auto number = [&](int of) {
          return torch::full({}, of, torch::kUInt8)
              .view(format)
              .to(torch::kFloat32)
              .item<float>();
        };
        const float here = number(bits), next = number(bits + 1);
        if (!std::isfinite(here) || !std::isfinite(next)) continue;
        const float half = here + (next - here) / 2;
        for (const float x :
             {here, half, std::nextafter(half, here),
              std::nextafter(half, next), std::nextafter(here, next)}) {
          const float signed_x = x * static_cast<float>(sign);
          EXPECT_EQ(
              format == torch::kFloat8_e4m3fn ? host::to_e4m3(signed_x)
                                              : host::to_e5m2(signed_x),
              bits_of(signed_x, format))
              << signed_x;
        }
      }
    }
  }
  for (const float wrong : {NAN, INFINITY, -INFINITY}) {
    EXPECT_EQ(host::to_e4m3(wrong) & 0x7f, 0x7f);
    EXPECT_EQ(host::to_e5m2(wrong) & 0x7f, 0x7f);
  }
}

template <class T>
Tensor largest_on_host(const Tensor& x, int blocks) {
  auto largest = torch::zeros({}, torch::kInt32);
  host::launch(blocks, 8, [&] {
    host::largest_magnitude<T, 1>(
        static_cast<const T*>(x.const_data_ptr()),
        reinterpret_cast<unsigned*>(largest.mutable_data_ptr()), x.numel(),
        blocks);
  });
  return largest.view(torch::kFloat32);
}

TEST(Fp8Kernels, FindTheLargestMagnitude) {
  torch::manual_seed(1);
  for (const int64_t size : {1, 7, 100}) {
    auto x = torch::randn({size});
    const auto largest = x.abs().max();
    EXPECT_TRUE(largest_on_host<float>(x, 3).equal(largest)) << size;
    EXPECT_TRUE(largest_on_host<host::BFloat16>(x.to(torch::kBFloat16), 1)
                    .equal(largest.to(torch::kBFloat16).to(torch::kFloat32)));
    x[size / 2] = -INFINITY;
    EXPECT_EQ(largest_on_host<float>(x, 2).item<float>(), INFINITY);
    x[0] = NAN;
    EXPECT_TRUE(std::isnan(largest_on_host<float>(x, 2).item<float>()));
  }
}

struct Rounded {
  Tensor rows, columns, scale;
};

template <class T, bool kGradient>
Rounded round_on_host(const Tensor& x, bool rows, bool columns) {
  const auto largest = x.abs().max().to(torch::kFloat32);
  const int64_t height = x.size(0), width = x.size(1);
  const int64_t across = (width + host::kTile - 1) / host::kTile;
  Rounded result{
      torch::full({height, width}, 255, torch::kUInt8),
      torch::full({width, height}, 255, torch::kUInt8), torch::zeros({})};
  const auto to = [](const Tensor& bytes, bool wanted) {
    return wanted ? bytes.data_ptr<uint8_t>() : nullptr;
  };
  const int64_t down = (height + host::kTile - 1) / host::kTile;
  host::launch(down * across, 256, [&] {
    host::to_fp8<T, kGradient>(
        static_cast<const T*>(x.const_data_ptr()),
        static_cast<const unsigned*>(largest.const_data_ptr()),
        to(result.rows, rows), to(result.columns, columns),
        result.scale.data_ptr<float>(), height, width,
        static_cast<unsigned>(across));
  });
  return result;
}

template <class T, bool kGradient>
void expect_rounded(const Tensor& x) {
  const auto format = kGradient ? torch::kFloat8_e5m2 : torch::kFloat8_e4m3fn;
  const auto scale = x.to(torch::kFloat32).abs().max().clamp_min(1e-30) /
                     (kGradient ? 57344 : 448);
  const auto expected =
      (x.to(torch::kFloat32) / scale).to(format).view(torch::kUInt8);
  const bool fits = x.size(0) % 16 == 0;
  const auto found = round_on_host<T, kGradient>(x, true, fits);
  EXPECT_TRUE(found.scale.equal(scale));
  EXPECT_TRUE(found.rows.equal(expected)) << x.sizes();
  if (!fits) return;
  EXPECT_TRUE(found.columns.equal(expected.t())) << x.sizes();
  // One alone, the other untouched.
  const auto alone = round_on_host<T, kGradient>(x, false, true);
  EXPECT_TRUE(alone.columns.equal(expected.t()));
  EXPECT_TRUE(alone.rows.equal(torch::full_like(alone.rows, 255)));
}

TEST(Fp8Kernels, RoundAndTransposeMatrices) {
  torch::manual_seed(2);
  for (const auto& [rows, columns] :
       {std::pair{1, 16}, {5, 48}, {16, 64}, {80, 144}, {67, 16}}) {
    const auto x = torch::randn({rows, columns});
    expect_rounded<float, false>(x);
    expect_rounded<float, true>(x * 1e20);
    expect_rounded<host::BFloat16, false>(x.to(torch::kBFloat16));
    expect_rounded<host::BFloat16, true>((x * 1e-20).to(torch::kBFloat16));
    expect_rounded<host::Half, true>(x.to(torch::kHalf));
  }
  expect_rounded<float, false>(torch::zeros({16, 16}));
  // A NaN makes the scale NaN, and with it all numbers.
  auto wrong = torch::randn({16, 16});
  wrong[3][4] = NAN;
  const auto found = round_on_host<float, false>(wrong, true, true);
  EXPECT_TRUE(found.scale.isnan().item<bool>());
  EXPECT_TRUE((found.rows & 0x7f).eq(0x7f).all().item<bool>());
}

// The last tile of a matrix of more than 2^32 elements.
TEST(Fp8Kernels, IndexMoreElementsThan32BitsDo) {
  torch::manual_seed(3);
  constexpr int64_t kColumns = 16 * host::kTile;
  const int64_t first = int64_t{1} << 22, rows = first + host::kTile;
  const auto x = torch::randn({host::kTile, kColumns});
  const auto* begin =
      host::begin_of_huge(x.const_data_ptr<float>(), first * kColumns);
  unsigned largest = 0;
  host::launch_block(first * kColumns / 256, 256, [&] {
    host::largest_magnitude<float, 4>(
        host::begin_of_huge(x.const_data_ptr<float>(), first * kColumns * 4),
        &largest, first * kColumns * 4 + 1024, first * kColumns / 256 + 1);
  });
  const auto most = x.view(-1).narrow(0, 0, 1024).abs().max();
  EXPECT_EQ(largest, host::magnitude_bits(most.item<float>()));

  largest = host::magnitude_bits(x.abs().max().item<float>());
  const auto expected = round_on_host<float, false>(x, true, true);
  const auto by_rows = torch::zeros({host::kTile, kColumns}, torch::kUInt8);
  // Memory that nothing touches costs nothing.
  const auto transposed = torch::empty({kColumns, rows}, torch::kUInt8);
  float scale = 0;
  const int64_t across = kColumns / host::kTile;
  for (int64_t tile = 0; tile < across; ++tile) {
    host::launch_block(first / host::kTile * across + tile, 256, [&] {
      host::to_fp8<float, false>(
          begin, &largest,
          host::begin_of_huge(by_rows.data_ptr<uint8_t>(), first * kColumns),
          transposed.data_ptr<uint8_t>(), &scale, rows, kColumns,
          static_cast<unsigned>(across));
    });
  }
  EXPECT_TRUE(by_rows.equal(expected.rows));
  EXPECT_TRUE(transposed.narrow(1, first, host::kTile).equal(expected.columns));
}

// On meta tensors that stand for a GPU's.
TEST(Fp8Kernels, GiveShapesOfMetaTensors) {
  const auto x = torch::empty(
      {32, 48}, torch::dtype(torch::kBFloat16).device(torch::kMeta));
  EXPECT_FALSE(kernels::takes_fp8(x));  // it stands for a CPU's
  const CountedFor cuda(torch::kCUDA);
  EXPECT_TRUE(kernels::takes_fp8(x));
  EXPECT_FALSE(kernels::takes_fp8(x.t()));
  EXPECT_FALSE(kernels::takes_fp8(x.narrow(1, 0, 40).contiguous()));
  const auto both = kernels::round_to_fp8(x, true, true, true);
  EXPECT_EQ(both.rows.sizes(), x.sizes());
  EXPECT_EQ(both.columns.sizes(), x.t().sizes());
  EXPECT_EQ(both.columns.scalar_type(), torch::kFloat8_e5m2);
  EXPECT_EQ(both.scale.scalar_type(), torch::kFloat32);
  const auto one = kernels::round_to_fp8(x, false, true, false);
  EXPECT_FALSE(one.columns.defined());
  EXPECT_EQ(one.rows.scalar_type(), torch::kFloat8_e4m3fn);
}

// With CUDA's compiler, where there is one.
TEST(Fp8Kernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("fp8.cu", host::kLargestThreads);
}

}  // namespace echelon::fp8_kernel_test
