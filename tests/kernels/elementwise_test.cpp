// The text that NVRTC compiles for GPUs, compiled for the host.
#include "echelon/kernels/elementwise.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "echelon/layers/computing_device.h"
#include "echelon/parallel/tensor/rotary.h"
#include "tests/kernels/host_kernels.h"
#include "tests/kernels/nvcc.h"

namespace echelon::host_kernels {
#include "echelon/kernels/elementwise.cu"
}  // namespace echelon::host_kernels

namespace echelon::elementwise_kernel_test {

namespace host = host_kernels;
using torch::Tensor;

constexpr int kThreads = 8;

// Calls `body` with a number of the kernels' type for each dtype.
template <class Body>
void for_dtypes(const Body& body) {
  body(torch::kFloat32, float());
  body(torch::kBFloat16, host::BFloat16());
  body(torch::kHalf, host::Half());
}

double rounding_of(torch::Dtype dtype) {
  return dtype == torch::kFloat32    ? 1e-5
         : dtype == torch::kBFloat16 ? 4e-3
                                     : 1e-3;
}

void expect_near(
    const Tensor& found, const Tensor& exact, const std::string& what) {
  EXPECT_TRUE(torch::allclose(
      found.to(torch::kFloat64), exact, rounding_of(found.scalar_type()), 1e-5))
      << what << "\n"
      << (found.to(torch::kFloat64) - exact).abs().max();
}

template <class T>
const T* of(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* to(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

template <class T, int K>
Tensor rotate_on_host(
    const Tensor& x, const RotaryTable& table, float sign, bool neighbours) {
  auto out = torch::full(x.sizes(), 7, x.options());
  host::launch_in_turn(x.size(0) * x.size(1), kThreads, [&] {
    host::rotate<T, K>(
        of<T>(x), of<float>(table.cosine), of<float>(table.sine), to<T>(out),
        x.size(1), x.size(2), x.size(3) / 2, x.stride(0), x.stride(1),
        x.stride(2), sign, neighbours);
  });
  return out;
}

// Heads are views of wider rows, as queries and keys of one product are.
TEST(ElementwiseKernels, RotateWhatFloat64Does) {
  torch::manual_seed(1);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    constexpr int kPacket = 16 / sizeof(T);
    for (const int64_t size : {2, 6, 32}) {
      const auto rows = torch::randn({2, 5, 4 * size + 16}).to(dtype);
      const auto x = rows.narrow(2, 16, 3 * size).view({2, 5, 3, size});
      const auto exact_table =
          rotary_table({}, size, 0, 5, torch::dtype(torch::kFloat64));
      const RotaryTable table{
          exact_table.cosine.to(torch::kFloat32).contiguous(),
          exact_table.sine.to(torch::kFloat32).contiguous()};
      for (const auto pairs : {RotaryPairs::halves, RotaryPairs::neighbours}) {
        const bool neighbours = pairs == RotaryPairs::neighbours;
        const auto exact = rotate(x.to(torch::kFloat64), exact_table, pairs);
        const std::string what =
            std::string(torch::toString(dtype)) + " " + std::to_string(size);
        const auto found = rotate_on_host<T, 1>(x, table, 1, neighbours);
        expect_near(found, exact, what);
        const auto back = rotate_on_host<T, 1>(found, table, -1, neighbours);
        EXPECT_TRUE(torch::allclose(
            back.to(torch::kFloat32), x.to(torch::kFloat32), 0,
            20 * rounding_of(dtype)))
            << what;
        if (!neighbours && size / 2 % kPacket == 0) {
          EXPECT_TRUE(
              (rotate_on_host<T, kPacket>(x, table, 1, false)).equal(found))
              << what;
        }
      }
    }
  });
}

template <class T, int K>
Tensor swiglu_on_host(const Tensor& gate, const Tensor& up) {
  auto out = torch::full(gate.sizes(), 7, gate.options());
  const int64_t n = gate.numel();
  host::launch_in_turn(n / kThreads / K + 1, kThreads, [&] {
    host::swiglu<T, K>(of<T>(gate), of<T>(up), to<T>(out), n);
  });
  return out;
}

template <class T, int K>
std::vector<Tensor> swiglu_gradient_on_host(
    const Tensor& gradient, const Tensor& gate, const Tensor& up) {
  auto to_gate = torch::full(gate.sizes(), 7, gate.options());
  auto to_up = torch::full(gate.sizes(), 7, gate.options());
  const int64_t n = gate.numel();
  host::launch_in_turn(n / kThreads / K + 1, kThreads, [&] {
    host::swiglu_gradient<T, K>(
        of<T>(gradient), of<T>(gate), of<T>(up), to<T>(to_gate), to<T>(to_up),
        n);
  });
  return {to_gate, to_up};
}

TEST(ElementwiseKernels, SwigluIsWhatFloat64Computes) {
  torch::manual_seed(2);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    constexpr int kPacket = 16 / sizeof(T);
    for (const int64_t n : {0, 1, 40, 129}) {
      const auto random = [&] { return torch::randn({n}).mul(3).to(dtype); };
      const auto gate = random(), up = random(), gradient = random();
      const auto x = gate.to(torch::kFloat64).requires_grad_();
      const auto y = up.to(torch::kFloat64).requires_grad_();
      const auto exact = at::silu(x) * y;
      const auto exact_gradients = torch::autograd::grad(
          {exact}, {x, y}, {gradient.to(torch::kFloat64)});
      const auto found = swiglu_on_host<T, 1>(gate, up);
      const auto gradients = swiglu_gradient_on_host<T, 1>(gradient, gate, up);
      expect_near(found, exact, "swiglu");
      expect_near(gradients[0], exact_gradients[0], "to gate");
      expect_near(gradients[1], exact_gradients[1], "to up");
      if (n % kPacket != 0) continue;
      EXPECT_TRUE((swiglu_on_host<T, kPacket>(gate, up)).equal(found));
      const auto in_packets =
          swiglu_gradient_on_host<T, kPacket>(gradient, gate, up);
      EXPECT_TRUE(in_packets[0].equal(gradients[0]));
      EXPECT_TRUE(in_packets[1].equal(gradients[1]));
    }
  });
  // Large numbers neither overflow nor become NaN.
  const auto large = torch::tensor({-200.F, 200.F});
  const auto ones = torch::ones({2});
  EXPECT_TRUE((swiglu_on_host<float, 1>(large, ones))
                  .equal(torch::tensor({-0.F, 200.F})));
  EXPECT_TRUE((swiglu_gradient_on_host<float, 1>(ones, large, ones))[0].equal(
      torch::tensor({0.F, 1.F})));
}

// At any place of a row in its sample's stream, also far in it.
TEST(ElementwiseKernels, MasksAreTheWordsOfPhilox) {
  const uint64_t stream = 0x123456789abcdef0;
  const uint32_t threshold = 0x40000000;
  const auto first = torch::tensor(
      {int64_t{0}, int64_t{1}, int64_t{6}, int64_t{1} << 36}, torch::kInt64);
  const auto keys = torch::tensor(
      {int64_t{5}, int64_t{-7}, int64_t{1} << 60, int64_t{0}}, torch::kInt64);
  for (const int64_t width : {1, 4, 7, 24}) {
    const auto mask = torch::full({4, width}, 9, torch::kUInt8);
    const int64_t counters = (width + 3) / 4 + 1;
    host::launch_in_turn(4 * counters / kThreads + 1, kThreads, [&] {
      host::dropout_mask(
          reinterpret_cast<const long long*>(first.const_data_ptr<int64_t>()),
          reinterpret_cast<const long long*>(keys.const_data_ptr<int64_t>()),
          mask.data_ptr<uint8_t>(), 4, width, counters, stream, threshold);
    });
    for (int64_t row = 0; row < 4; ++row) {
      const auto begin = first[row].item<int64_t>();
      at::Philox4_32 words(
          stream, static_cast<uint64_t>(keys[row].item<int64_t>()),
          static_cast<uint64_t>(begin / 4));
      for (int64_t i = 0; i < begin % 4; ++i) words();
      for (int64_t i = 0; i < width; ++i) {
        EXPECT_EQ(mask[row][i].item<int>(), words() >= threshold ? 1 : 0)
            << width << " " << row << " " << i;
      }
    }
  }
}

template <class T, int K>
Tensor dropout_on_host(const Tensor& x, const Tensor& keep, float scale) {
  auto out = torch::full(x.sizes(), 7, x.options());
  host::launch_in_turn(x.numel() / kThreads / K + 1, kThreads, [&] {
    host::dropout<T, K>(
        of<T>(x), static_cast<const unsigned char*>(keep.const_data_ptr()),
        to<T>(out), x.numel(), scale);
  });
  return out;
}

TEST(ElementwiseKernels, DropoutScalesWhatItKeeps) {
  torch::manual_seed(3);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    const auto x = torch::randn({64}).to(dtype);
    x[3] = INFINITY;
    const auto keep = torch::rand({64}).gt(0.3);
    keep[3] = false;
    const auto exact = at::where(
        keep, x.to(torch::kFloat64) * 1.25, torch::zeros({}, torch::kFloat64));
    const auto found = dropout_on_host<T, 1>(x, keep, 1.25F);
    expect_near(found, exact, torch::toString(dtype));
    EXPECT_TRUE(
        (dropout_on_host<T, 16 / sizeof(T)>(x, keep, 1.25F)).equal(found));
  });
}

// On meta tensors that stand for a GPU's, shapes and nothing else.
TEST(ElementwiseKernels, GiveShapesOfMetaTensors) {
  const auto x = torch::empty(
      {2, 3, 4, 8}, torch::dtype(torch::kBFloat16).device(torch::kMeta));
  EXPECT_FALSE(kernels::takes_elementwise(x));  // it stands for a CPU's
  const CountedFor cuda(torch::kCUDA);
  EXPECT_TRUE(kernels::takes_elementwise(x));
  EXPECT_FALSE(kernels::takes_elementwise(x.to(torch::kFloat64)));
  const auto table = torch::empty({3, 4}, torch::device(torch::kMeta));
  const auto view = x.transpose(1, 2).contiguous().transpose(1, 2);
  const auto rotated = kernels::rotate(view, table, table, 1, false);
  EXPECT_EQ(rotated.sizes(), x.sizes());
  EXPECT_TRUE(rotated.is_contiguous());
  EXPECT_EQ(kernels::swiglu(x, x).sizes(), x.sizes());
  const auto [to_gate, to_up] = kernels::swiglu_gradient(x, x, x);
  EXPECT_EQ(to_gate.sizes(), x.sizes());
  EXPECT_EQ(to_up.scalar_type(), torch::kBFloat16);
  const auto ids =
      torch::empty({6}, torch::dtype(torch::kInt64).device(torch::kMeta));
  const auto mask = kernels::dropout_mask(ids, ids, 10, ~uint64_t{0}, 7);
  EXPECT_EQ(mask.sizes(), (std::vector<int64_t>{6, 10}));
  EXPECT_EQ(mask.scalar_type(), torch::kBool);
  EXPECT_EQ(kernels::dropout(x, mask, 2).sizes(), x.sizes());
}

// With CUDA's compiler, where there is one.
TEST(ElementwiseKernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("elementwise.cu");
}

}  // namespace echelon::elementwise_kernel_test
