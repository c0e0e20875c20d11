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

template <class T>
host::Heads<T> heads(const Tensor& x) {
  if (!x.defined()) return {};
  return {of<T>(x), x.stride(0), x.stride(1), x.stride(2), x.size(2)};
}

template <class T, int K>
Tensor rotate_on_host(
    const std::vector<Tensor>& x, const RotaryTable& table, float sign,
    bool neighbours) {
  auto sizes = x[0].sizes().vec();
  for (size_t i = 1; i < x.size(); ++i) sizes[2] += x[i].size(2);
  const auto at = [&](size_t i) {
    return heads<T>(i < x.size() ? x[i] : Tensor());
  };
  auto out = torch::full(sizes, 7, x[0].options());
  host::launch_in_turn(sizes[0] * sizes[1], kThreads, [&] {
    host::rotate<T, K>(
        at(0), at(1), at(2), of<float>(table.cosine), of<float>(table.sine),
        to<T>(out), sizes[1], sizes[3] / 2, sign, neighbours);
  });
  return out;
}

struct Tables {
  RotaryTable exact;
  RotaryTable single;
};
Tables tables(int64_t size, int64_t positions) {
  const auto exact =
      rotary_table({}, size, 0, positions, torch::dtype(torch::kFloat64));
  return {
      exact,
      {exact.cosine.to(torch::kFloat32).contiguous(),
       exact.sine.to(torch::kFloat32).contiguous()}};
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
      const auto [exact_table, table] = tables(size, 5);
      for (const auto pairs : {RotaryPairs::halves, RotaryPairs::neighbours}) {
        const bool neighbours = pairs == RotaryPairs::neighbours;
        const auto exact = rotate(x.to(torch::kFloat64), exact_table, pairs);
        const std::string what =
            std::string(torch::toString(dtype)) + " " + std::to_string(size);
        const auto found = rotate_on_host<T, 1>({x}, table, 1, neighbours);
        expect_near(found, exact, what);
        const auto back = rotate_on_host<T, 1>({found}, table, -1, neighbours);
        EXPECT_TRUE(torch::allclose(
            back.to(torch::kFloat32), x.to(torch::kFloat32), 0,
            20 * rounding_of(dtype)))
            << what;
        if (!neighbours && size / 2 % kPacket == 0) {
          EXPECT_TRUE(
              (rotate_on_host<T, kPacket>({x}, table, 1, false)).equal(found))
              << what;
        }
      }
    }
  });
}

// Of one product, and of tensors of their own, as gradients are.
TEST(ElementwiseKernels, RotateQueriesAndKeysAndCopyValues) {
  torch::manual_seed(4);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    constexpr int kPacket = 16 / sizeof(T);
    const int64_t size = 2 * kPacket;
    const auto all = torch::randn({2, 5, 4 + 2 + 3, size}).to(dtype);
    all[1][2][8] = INFINITY;  // a value
    const auto [exact_table, table] = tables(size, 5);
    const auto parts = all.split_with_sizes({4, 2, 3}, 2);
    const auto exact = torch::cat(
        {rotate(all.narrow(2, 0, 6).to(torch::kFloat64), exact_table),
         parts[2].to(torch::kFloat64)},
        2);
    const auto found = rotate_on_host<T, 1>(parts, table, 1, false);
    expect_near(found, exact, torch::toString(dtype));
    EXPECT_TRUE(found.narrow(2, 6, 3).equal(parts[2]));
    EXPECT_TRUE(
        (rotate_on_host<T, kPacket>(parts, table, 1, false)).equal(found));
    const std::vector<Tensor> apart = {
        parts[0].transpose(1, 2).contiguous().transpose(1, 2),
        parts[1].contiguous(), parts[2].contiguous()};
    EXPECT_TRUE(
        (rotate_on_host<T, kPacket>(apart, table, 1, false)).equal(found));
  });
}

// `gate` and `up` are [rows, width], rows at one distance.
template <class T, int K>
Tensor swiglu_on_host(const Tensor& gate, const Tensor& up) {
  auto out = torch::full(gate.sizes(), 7, gate.options());
  const int64_t width = gate.size(1);
  const auto pieces = static_cast<unsigned>(width / kThreads / K + 1);
  host::launch_in_turn(gate.size(0) * pieces, kThreads, [&] {
    host::swiglu<T, K>(
        of<T>(gate), of<T>(up), to<T>(out), width, gate.stride(0), pieces);
  });
  return out;
}

template <class T, int K>
std::vector<Tensor> swiglu_gradient_on_host(
    const Tensor& gradient, const Tensor& gate, const Tensor& up) {
  const int64_t width = gate.size(1);
  auto out = torch::full({gate.size(0), 2 * width}, 7, gate.options());
  const auto pieces = static_cast<unsigned>(width / kThreads / K + 1);
  host::launch_in_turn(gate.size(0) * pieces, kThreads, [&] {
    host::swiglu_gradient<T, K>(
        of<T>(gradient), of<T>(gate), of<T>(up), to<T>(out), width,
        gate.stride(0), pieces);
  });
  return out.chunk(2, 1);
}

// Tensors of their own, and both in one tensor, as one product makes them.
TEST(ElementwiseKernels, SwigluIsWhatFloat64Computes) {
  torch::manual_seed(2);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    constexpr int kPacket = 16 / sizeof(T);
    for (const int64_t width : {0, 1, 40, 129}) {
      for (const bool together : {false, true}) {
        const auto random = [&](int64_t wide) {
          return torch::randn({3, wide}).mul(3).to(dtype);
        };
        const auto both = random(2 * width);
        const auto gate = together ? both.narrow(1, 0, width) : random(width);
        const auto up = together ? both.narrow(1, width, width) : random(width);
        const auto gradient = random(width);
        const auto x = gate.to(torch::kFloat64).requires_grad_();
        const auto y = up.to(torch::kFloat64).requires_grad_();
        const auto exact = at::silu(x) * y;
        const auto exact_gradients = torch::autograd::grad(
            {exact}, {x, y}, {gradient.to(torch::kFloat64)});
        const auto found = swiglu_on_host<T, 1>(gate, up);
        const auto gradients =
            swiglu_gradient_on_host<T, 1>(gradient, gate, up);
        expect_near(found, exact, "swiglu");
        expect_near(gradients[0], exact_gradients[0], "to gate");
        expect_near(gradients[1], exact_gradients[1], "to up");
        if (width % kPacket != 0) continue;
        EXPECT_TRUE((swiglu_on_host<T, kPacket>(gate, up)).equal(found));
        const auto in_packets =
            swiglu_gradient_on_host<T, kPacket>(gradient, gate, up);
        EXPECT_TRUE(in_packets[0].equal(gradients[0]));
        EXPECT_TRUE(in_packets[1].equal(gradients[1]));
      }
    }
  });
  // Large numbers neither overflow nor become NaN.
  const auto large = torch::tensor({{-200.F, 200.F}});
  const auto ones = torch::ones({1, 2});
  EXPECT_TRUE((swiglu_on_host<float, 1>(large, ones))
                  .equal(torch::tensor({{-0.F, 200.F}})));
  EXPECT_TRUE((swiglu_gradient_on_host<float, 1>(ones, large, ones))[0].equal(
      torch::tensor({{0.F, 1.F}})));
}

struct GeluOnHost {
  Tensor out;
  Tensor to_x;
  Tensor to_bias;
};

// The gradient has `parts` blocks for each tile of columns.
template <class T, int K>
GeluOnHost gelu_on_host(const Tensor& gradient, const Tensor& x, int parts) {
  constexpr int kBlock = 2 * host::kGeluLanes;
  const int64_t rows = x.size(0), width = x.size(1);
  constexpr int64_t kColumns = host::kGeluLanes * K;
  const int tiles = static_cast<int>((width + kColumns - 1) / kColumns);
  const auto full = [&](at::IntArrayRef sizes, torch::Dtype dtype) {
    return torch::full(sizes, 7, x.options().dtype(dtype));
  };
  const auto dtype = x.scalar_type();
  const auto out = full({rows, width}, dtype);
  const auto counters = full({tiles + 1}, torch::kInt32);
  auto* const arrived =
      reinterpret_cast<unsigned*>(counters.template data_ptr<int>());
  host::launch_in_turn(x.numel() / kThreads / K + 1, kThreads, [&] {
    host::gelu<T, K>(of<T>(x), to<T>(out), arrived, x.numel(), tiles);
  });
  EXPECT_EQ(counters[tiles].template item<int>(), 7);
  const auto back = [&](host::BlockOrder order) {
    const auto to_x = full({rows, width}, dtype);
    const auto to_bias = full({width}, dtype);
    const auto partial = full({parts, width}, torch::kFloat32);
    host::launch(
        int64_t{tiles} * parts, kBlock,
        [&] {
          host::gelu_gradient<T, K>(
              of<T>(gradient), of<T>(x), to<T>(to_x), to<float>(partial),
              to<T>(to_bias), arrived, rows, width, parts);
        },
        order);
    EXPECT_TRUE(counters.narrow(0, 0, tiles).eq(0).all().template item<bool>());
    return std::pair(to_x, to_bias);
  };
  const auto [to_x, to_bias] = back(host::BlockOrder::forwards);
  // Whichever block is the last, and a second time: the same bits.
  const auto again = back(host::BlockOrder::backwards);
  EXPECT_TRUE(again.first.equal(to_x));
  EXPECT_TRUE(again.second.equal(to_bias));
  return {out, to_x, to_bias};
}

TEST(ElementwiseKernels, GeluAndTheGradientOfItsBiasAreWhatFloat64Computes) {
  torch::manual_seed(3);
  for_dtypes([](torch::Dtype dtype, auto number) {
    using T = decltype(number);
    constexpr int kPacket = 16 / sizeof(T);
    const int64_t tile = host::kGeluLanes * kPacket;
    // Fewer rows than blocks, several for each thread, and two tiles.
    struct Case {
      int64_t rows, width;
      int parts;
    };
    for (const auto& [rows, width, parts] :
         {Case{1, 1, 1}, Case{1, 40, 3}, Case{29, 33, 3},
          Case{29, tile + kPacket, 3}}) {
      const std::string what = std::string(torch::toString(dtype)) + " " +
                               std::to_string(rows) + " x " +
                               std::to_string(width);
      const auto x = torch::randn({rows, width}).mul(3).to(dtype);
      const auto gradient = torch::randn({rows, width}).to(dtype);
      const auto exact_x = x.to(torch::kFloat64).requires_grad_();
      const auto exact = at::gelu(exact_x, "tanh");
      exact.backward(gradient.to(torch::kFloat64));
      const auto expect_exact = [&](const GeluOnHost& found) {
        expect_near(found.out, exact, what);
        expect_near(found.to_x, exact_x.grad(), what + " to x");
        expect_near(found.to_bias, exact_x.grad().sum(0), what + " to bias");
      };
      if (width <= tile) {
        expect_exact(gelu_on_host<T, 1>(gradient, x, parts));
      }
      if (width % kPacket == 0) {
        expect_exact(gelu_on_host<T, kPacket>(gradient, x, parts));
      }
    }
  });
}

// Neither large nor small numbers become NaN.
TEST(ElementwiseKernels, GeluOfLargeNumbers) {
  const auto x = torch::tensor({{-1e18F, -200.F, 0.F, 200.F, 1e18F}});
  const auto found = gelu_on_host<float, 1>(torch::ones({1, 5}), x, 1);
  EXPECT_TRUE(
      found.out.equal(torch::tensor({{-0.F, -0.F, 0.F, 200.F, 1e18F}})));
  const auto slopes = torch::tensor({{0.F, 0.F, 0.5F, 1.F, 1.F}});
  EXPECT_TRUE(found.to_x.equal(slopes)) << found.to_x;
  EXPECT_TRUE(found.to_bias.equal(slopes[0]));
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
Tensor dropout_on_host(
    const Tensor& x, const Tensor& keep, float scale,
    const Tensor& residual = {}) {
  auto out = torch::full(x.sizes(), 7, x.options());
  host::launch_in_turn(x.numel() / kThreads / K + 1, kThreads, [&] {
    host::dropout<T, K>(
        of<T>(x), static_cast<const unsigned char*>(keep.const_data_ptr()),
        residual.defined() ? of<T>(residual) : nullptr, to<T>(out), x.numel(),
        scale);
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
    const auto residual = torch::randn({64}).to(dtype);
    const auto sum = dropout_on_host<T, 1>(x, keep, 1.25F, residual);
    expect_near(sum, exact + residual.to(torch::kFloat64), "with a residual");
    EXPECT_TRUE((dropout_on_host<T, 16 / sizeof(T)>(x, keep, 1.25F, residual))
                    .equal(sum));
  });
}

// The last row, or the last elements, of a tensor of more than 2^32 elements.
TEST(ElementwiseKernels, RotateHugeTensors) {
  torch::manual_seed(5);
  const int64_t sample = (int64_t{1} << 20) + 3, numbers = 32 * 128;
  const auto x = torch::randn({1, 1, 32, 128});
  const auto [exact_table, table] = tables(128, 1);
  const auto out = torch::zeros_like(x);
  auto all = heads<float>(x);
  all.x = host::begin_of_huge(all.x, sample * numbers);
  host::launch_in_turn(
      1, kThreads,
      [&] {
        host::rotate<float, 4>(
            all, {}, {}, of<float>(table.cosine), of<float>(table.sine),
            host::begin_of_huge(to<float>(out), sample * numbers), 1, 64, 1,
            false);
      },
      sample);
  expect_near(out, rotate(x.to(torch::kFloat64), exact_table), "rotated");
}

TEST(ElementwiseKernels, SwigluOfHugeTensors) {
  torch::manual_seed(6);
  const int64_t row = (int64_t{1} << 22) + 5, width = 1024;
  const auto gate = torch::randn({1, width}), up = torch::randn({1, width}),
             gradient = torch::randn({1, width});
  const auto out = torch::zeros({1, width}),
             gradients = torch::zeros({1, 2 * width});
  const auto begin = [&](const Tensor& x, int64_t stride) {
    return host::begin_of_huge(to<float>(x), row * stride);
  };
  // Four pieces of 64 threads of 4 elements; rows of both in one tensor.
  host::launch_in_turn(
      4, 64,
      [&] {
        host::swiglu<float, 4>(
            begin(gate, 2 * width), begin(up, 2 * width), begin(out, width),
            width, 2 * width, 4);
        host::swiglu_gradient<float, 4>(
            begin(gradient, width), begin(gate, 2 * width),
            begin(up, 2 * width), begin(gradients, 2 * width), width, 2 * width,
            4);
      },
      row * 4);
  EXPECT_TRUE(out.equal(swiglu_on_host<float, 4>(gate, up)));
  const auto expected = swiglu_gradient_on_host<float, 4>(gradient, gate, up);
  EXPECT_TRUE(gradients.equal(torch::cat(expected, 1)));
}

TEST(ElementwiseKernels, GeluOfHugeTensors) {
  torch::manual_seed(7);
  constexpr int64_t kWidth = int64_t{4} * host::kGeluLanes;  // one tile
  const auto x = torch::randn({1, kWidth}).mul(3);
  const auto gradient = torch::randn({1, kWidth});
  const auto expected = gelu_on_host<float, 4>(gradient, x, 1);
  const auto out = torch::zeros_like(x), to_x = torch::zeros_like(x),
             sums = torch::zeros({kWidth});
  unsigned counter = 0;
  const int64_t part = int64_t{1} << 26, first = part * kWidth;
  host::launch_in_turn(
      1, host::kGeluLanes,
      [&] {
        host::gelu<float, 4>(
            host::begin_of_huge(of<float>(x), first),
            host::begin_of_huge(to<float>(out), first), &counter,
            first + kWidth, 1);
      },
      part);
  // A block of one row, which is not the last of its tile.
  host::launch_block(part, host::kGeluLanes, [&] {
    host::gelu_gradient<float, 4>(
        host::begin_of_huge(of<float>(gradient), first),
        host::begin_of_huge(of<float>(x), first),
        host::begin_of_huge(to<float>(to_x), first),
        host::begin_of_huge(to<float>(sums), first), nullptr, &counter,
        part + 1, kWidth, static_cast<int>(part + 1));
  });
  EXPECT_EQ(counter, 1U);
  EXPECT_TRUE(out.equal(expected.out));
  EXPECT_TRUE(to_x.equal(expected.to_x));
  EXPECT_TRUE(sums.equal(expected.to_bias));
}

TEST(ElementwiseKernels, DropoutOfHugeTensors) {
  torch::manual_seed(8);
  const int64_t row = (int64_t{1} << 22) + 1, width = 2044, counters = 512;
  const auto x = torch::randn({1, width}), out = torch::zeros_like(x);
  const auto position = torch::tensor({int64_t{6}}, torch::kInt64);
  // The mask of row number `at`.
  const auto mask_of = [&](int64_t at) {
    const auto mask = torch::full({1, width}, 9, torch::kUInt8);
    const auto* numbers = host::begin_of_huge(
        reinterpret_cast<const long long*>(position.const_data_ptr<int64_t>()),
        at);
    host::launch_in_turn(
        counters / 256, 256,
        [&] {
          host::dropout_mask(
              numbers, numbers,
              host::begin_of_huge(mask.data_ptr<uint8_t>(), at * width), at + 1,
              width, counters, 5, 0x40000000);
        },
        at * counters / 256);
    return mask;
  };
  const auto mask = mask_of(row);
  EXPECT_TRUE(mask.equal(mask_of(0)));
  host::launch_in_turn(
      width / 28, 28,
      [&] {
        host::dropout<float, 1>(
            host::begin_of_huge(of<float>(x), row * width),
            host::begin_of_huge(mask.const_data_ptr<uint8_t>(), row * width),
            host::begin_of_huge(of<float>(x), row * width),
            host::begin_of_huge(to<float>(out), row * width), (row + 1) * width,
            1.25F);
      },
      row * width / 28);
  EXPECT_TRUE(out.equal(dropout_on_host<float, 1>(x, mask, 1.25F, x)));
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
  const auto rotated = kernels::rotate(view, {}, {}, table, table, 1, false);
  EXPECT_EQ(rotated.sizes(), x.sizes());
  EXPECT_TRUE(rotated.is_contiguous());
  EXPECT_EQ(
      kernels::rotate(view, x.narrow(2, 0, 1), view, table, table, 1, false)
          .sizes(),
      (std::vector<int64_t>{2, 3, 9, 8}));
  EXPECT_EQ(kernels::swiglu(x, x).sizes(), x.sizes());
  const auto gradients = kernels::swiglu_gradient(x, x, x);
  EXPECT_EQ(gradients.sizes(), (std::vector<int64_t>{2, 3, 4, 16}));
  EXPECT_EQ(gradients.scalar_type(), torch::kBFloat16);
  const auto gelu = kernels::gelu(view);
  EXPECT_TRUE(gelu.gelu.is_contiguous());
  EXPECT_EQ(gelu.gelu.sizes(), x.sizes());
  EXPECT_EQ(gelu.counters.scalar_type(), torch::kInt32);
  const auto of_gelu = kernels::gelu_gradient(x, x, gelu.counters);
  EXPECT_EQ(of_gelu.x.sizes(), x.sizes());
  EXPECT_EQ(of_gelu.bias.sizes(), (std::vector<int64_t>{8}));
  EXPECT_EQ(of_gelu.bias.scalar_type(), torch::kBFloat16);
  const auto ids =
      torch::empty({6}, torch::dtype(torch::kInt64).device(torch::kMeta));
  const auto mask = kernels::dropout_mask(ids, ids, 10, ~uint64_t{0}, 7);
  EXPECT_EQ(mask.sizes(), (std::vector<int64_t>{6, 10}));
  EXPECT_EQ(mask.scalar_type(), torch::kBool);
  EXPECT_EQ(kernels::dropout(x, mask, 2).sizes(), x.sizes());
  EXPECT_EQ(kernels::dropout(x, mask, 2, x).sizes(), x.sizes());
}

// With CUDA's compiler, where there is one.
TEST(ElementwiseKernels, CompileForEveryArchitectureWithoutSpills) {
  ECHELON_NEED_NVCC();
  expect_compiles_without_spills("elementwise.cu", host::kGeluThreads);
}

}  // namespace echelon::elementwise_kernel_test
