#include "echelon/comm/shared_memory/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace echelon::local::reduce_test {

struct Kernels {
  const char* name;
  void (*function)(Dtype, Reduction, Buffers);
};

std::vector<Kernels> kernels_of_this_cpu() {
  std::vector<Kernels> kernels = {{"x86-64", detail::reduce_baseline}};
  if (std::string(reduce_kernels()) != "x86-64") {
    kernels.push_back({"avx2", detail::reduce_avx2});
  }
  if (std::string(reduce_kernels()) == "avx512") {
    kernels.push_back({"avx512", detail::reduce_avx512});
  }
  return kernels;
}

template <class T, class A>
T plain(const std::vector<std::vector<T>>& in, size_t i, Reduction op) {
  A value = static_cast<A>(in[0][i]);
  for (size_t j = 1; j < in.size(); ++j) {
    const A other = static_cast<A>(in[j][i]);
    value = op == Reduction::min   ? std::min(value, other)
            : op == Reduction::max ? std::max(value, other)
                                   : static_cast<A>(value + other);
  }
  if (op == Reduction::avg) value /= static_cast<A>(in.size());
  return static_cast<T>(value);
}

template <class T, class A>
void check(Dtype dtype) {
  for (const auto& kernels : kernels_of_this_cpu()) {
    for (const int num : {1, 2, 3, 4, 5, 8}) {
      for (const size_t count : {0, 1, 15, 256, 257, 1000}) {
        for (const auto op :
             {Reduction::sum, Reduction::avg, Reduction::min, Reduction::max}) {
          std::vector<std::vector<T>> in(num, std::vector<T>(count));
          uint32_t random = 12345;
          for (auto& values : in) {
            for (auto& v : values) {
              random = random * 1664525 + 1013904223;
              v = static_cast<T>(static_cast<int32_t>(random >> 8) % 100);
            }
          }
          const auto inputs = in;
          std::vector<const void*> from;
          std::vector<void*> to;
          for (auto& values : in) {
            from.push_back(values.data());
            to.push_back(values.data());
          }
          kernels.function(
              dtype, op, {num, from.data(), num, to.data(), count});
          for (int j = 0; j < num; ++j) {
            for (size_t i = 0; i < count; ++i) {
              ASSERT_EQ(in[j][i], (plain<T, A>(inputs, i, op)))
                  << kernels.name << " " << name_of(dtype) << " " << name_of(op)
                  << " of " << num << " at " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Reduce, EqualsPlainArithmetic) {
  check<float, float>(Dtype::float32);
  check<double, double>(Dtype::float64);
  check<int8_t, int32_t>(Dtype::int8);
  check<uint8_t, int32_t>(Dtype::uint8);
  check<int16_t, int32_t>(Dtype::int16);
  check<int32_t, int64_t>(Dtype::int32);
  check<int64_t, int64_t>(Dtype::int64);
}

TEST(Reduce, Bool) {
  for (const auto& kernels : kernels_of_this_cpu()) {
    const uint8_t a[] = {0, 0, 1, 1};
    const uint8_t b[] = {0, 1, 0, 1};
    const void* in[] = {a, b};
    uint8_t out[4];
    void* to = out;
    const auto run = [&](Reduction op) {
      kernels.function(Dtype::boolean, op, {2, in, 1, &to, 4});
      return std::vector<int>(out, out + 4);
    };
    EXPECT_EQ(run(Reduction::sum), (std::vector<int>{0, 1, 1, 1}));
    EXPECT_EQ(run(Reduction::max), (std::vector<int>{0, 1, 1, 1}));
    EXPECT_EQ(run(Reduction::min), (std::vector<int>{0, 0, 0, 1}));
  }
}

// Every float16 value is read right, and every float near one is rounded right:
// the compiler's own conversion is the reference.
TEST(Reduce, Float16RoundsToNearest) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) {
    halves[i] = static_cast<uint16_t>(i);
  }
  std::vector<uint16_t> others(65536);
  for (size_t i = 0; i < others.size(); ++i) {
    others[i] = static_cast<uint16_t>(i * 40503u + 7u);
  }
  for (const auto& kernels : kernels_of_this_cpu()) {
    std::vector<uint16_t> out(65536);
    const void* in[] = {halves.data(), others.data()};
    void* to = out.data();
    kernels.function(Dtype::float16, Reduction::sum, {2, in, 1, &to, 65536});
    for (size_t i = 0; i < out.size(); ++i) {
      _Float16 a, b, got;
      std::memcpy(&a, &halves[i], 2);
      std::memcpy(&b, &others[i], 2);
      std::memcpy(&got, &out[i], 2);
      const auto expected =
          static_cast<_Float16>(static_cast<float>(a) + static_cast<float>(b));
      if (std::isnan(static_cast<float>(expected))) {
        ASSERT_TRUE(std::isnan(static_cast<float>(got))) << kernels.name << i;
      } else {
        ASSERT_EQ(static_cast<float>(got), static_cast<float>(expected))
            << kernels.name << " " << i;
      }
    }
  }
}

TEST(Reduce, BFloat16RoundsToNearestEven) {
  const auto bf = [](float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return static_cast<uint16_t>(bits >> 16);
  };
  for (const auto& kernels : kernels_of_this_cpu()) {
    // 1 + 2^-8 is half way between 1 and 1 + 2^-7: to even, down; the next odd
    // neighbour goes up.
    const uint16_t a[] = {bf(1.0f), bf(1.0f + 0x1p-7f), bf(INFINITY), bf(1.0f)};
    const uint16_t b[] = {bf(0x1p-8f), bf(0x1p-8f), bf(-INFINITY), bf(0x1p-8f)};
    const uint16_t c[] = {bf(0.0f), bf(0.0f), bf(0.0f), bf(0x1p-20f)};
    const void* in[] = {a, b, c};
    uint16_t out[4];
    void* to = out;
    kernels.function(Dtype::bfloat16, Reduction::sum, {3, in, 1, &to, 4});
    EXPECT_EQ(out[0], bf(1.0f));
    EXPECT_EQ(out[1], bf(1.0f + 0x1p-6f));
    EXPECT_EQ(out[2] & 0x7fff, 0x7fc0);  // NaN stays one
    EXPECT_EQ(out[3], bf(1.0f + 0x1p-7f)) << "rounded once, at the end";
  }
}

TEST(Reduce, NanWins) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& kernels : kernels_of_this_cpu()) {
    for (const auto op : {Reduction::min, Reduction::max}) {
      std::vector<float> a(40, 1), b(40, nan), c(40, 2), out(40);
      for (const auto& in :
           {std::vector<const void*>{a.data(), b.data(), c.data()},
            std::vector<const void*>{b.data(), a.data(), c.data()},
            std::vector<const void*>{a.data(), c.data(), b.data()}}) {
        void* to = out.data();
        kernels.function(Dtype::float32, op, {3, in.data(), 1, &to, 40});
        EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[39]));
      }
    }
  }
}

}  // namespace echelon::local::reduce_test
