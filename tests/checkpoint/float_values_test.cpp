#include "echelon/checkpoint/float_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace echelon {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename Bits>
double value_of(const char* dtype, Bits bits) {
  double value = -1;
  EXPECT_TRUE(
      read_floats(dtype, reinterpret_cast<const std::byte*>(&bits), 1, &value));
  return value;
}

TEST(FloatValues, OfHalfPrecision) {
  const auto half = [](uint16_t bits) { return value_of("F16", bits); };
  EXPECT_EQ(half(0x3C00), 1);
  EXPECT_EQ(half(0xC000), -2);
  EXPECT_EQ(half(0x7BFF), 65504);
  EXPECT_EQ(half(0x0400), 0x1p-14);            // the smallest normal one
  EXPECT_EQ(half(0x03FF), 1023 * 0x1p-24);     // the largest subnormal one
  EXPECT_EQ(half(0x8001), -0x1p-24);
  EXPECT_EQ(half(0x3555), 0.333251953125);
  EXPECT_EQ(half(0x7C00), kInfinity);
  EXPECT_EQ(half(0xFC00), -kInfinity);
  EXPECT_TRUE(std::isnan(half(0x7E00)));
  EXPECT_TRUE(std::signbit(half(0x8000)));
  EXPECT_EQ(half(0x8000), 0);
}

// All of them, by the definition: (-1)^s 2^(e - 15) (1 + f / 1024).
TEST(FloatValues, EveryHalfThatIsANumber) {
  for (int sign : {0, 1}) {
    for (int exponent = 0; exponent < 31; ++exponent) {
      for (int fraction = 0; fraction < 1024; ++fraction) {
        const auto bits =
            static_cast<uint16_t>(sign << 15 | exponent << 10 | fraction);
        const double size =
            exponent == 0 ? std::ldexp(fraction, -24)
                          : std::ldexp(1024 + fraction, exponent - 25);
        ASSERT_EQ(value_of("F16", bits), sign != 0 ? -size : size) << bits;
      }
    }
  }
}

TEST(FloatValues, OfTheOthers) {
  EXPECT_EQ(value_of("BF16", uint16_t{0x3F80}), 1);
  EXPECT_EQ(value_of("BF16", uint16_t{0xC2F7}), -123.5);
  EXPECT_EQ(value_of("BF16", uint16_t{0x7F80}), kInfinity);
  EXPECT_EQ(value_of("BF16", uint16_t{0x0001}), 0x1p-133);
  EXPECT_EQ(value_of("F32", 0.1f), static_cast<double>(0.1f));
  EXPECT_EQ(value_of("F64", 0.1), 0.1);
}

TEST(FloatValues, ManyAtOnceAndUnaligned) {
  const std::vector<float> values = {1, -2.5f, 3e-30f};
  std::vector<std::byte> bytes(1 + 4 * values.size());
  std::memcpy(bytes.data() + 1, values.data(), 4 * values.size());
  double read[3];
  ASSERT_TRUE(read_floats("F32", bytes.data() + 1, 3, read));
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(read[i], values[i]);
}

TEST(FloatValues, OthersAreNoFloats) {
  for (const char* dtype : {"I64", "U8", "BOOL", "F8_E4M3", ""}) {
    EXPECT_FALSE(is_float(dtype));
    double value = 7;
    EXPECT_FALSE(read_floats(dtype, nullptr, 1, &value));
    EXPECT_EQ(value, 7);
  }
}

}  // namespace
}  // namespace echelon
