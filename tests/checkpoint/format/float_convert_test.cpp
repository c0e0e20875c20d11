#include "echelon/checkpoint/format/float_convert.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon::float_convert_test {

template <class To, class From>
std::vector<To> convert(
    const std::string& from_dtype, const std::vector<From>& from,
    const std::string& to_dtype) {
  std::vector<To> to(from.size());
  convert_floats(
      from_dtype, std::as_bytes(std::span(from)).data(), to_dtype,
      std::as_writable_bytes(std::span(to)).data(),
      static_cast<int64_t>(from.size()));
  return to;
}

std::vector<uint16_t> all_bits() {
  std::vector<uint16_t> bits(65536);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  return bits;
}

// The values of all finite numbers of 16 bits, from their definition.
double value_of(const std::string& dtype, uint16_t bits) {
  const int fraction_bits = dtype == "F16" ? 10 : 7;
  const int bias = dtype == "F16" ? 15 : 127;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> fraction_bits;
  const double magnitude = exponent == 0
                               ? std::ldexp(fraction, 1 - bias - fraction_bits)
                               : std::ldexp(
                                     fraction + (1 << fraction_bits),
                                     exponent - bias - fraction_bits);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t infinity(const std::string& dtype) {
  return dtype == "F16" ? 0x7c00 : 0x7f80;
}

class SixteenBits : public testing::TestWithParam<const char*> {};

TEST_P(SixteenBits, EveryValueIsWhatItsBitsSay) {
  const std::string dtype = GetParam();
  const auto bits = all_bits();
  const auto values = convert<double>(dtype, bits, "F64");
  for (size_t i = 0; i < bits.size(); ++i) {
    const auto magnitude = bits[i] & 0x7fff;
    if (magnitude > infinity(dtype)) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
    } else if (magnitude == infinity(dtype)) {
      EXPECT_TRUE(std::isinf(values[i])) << i;
    } else {
      EXPECT_EQ(values[i], value_of(dtype, bits[i])) << i;
    }
    EXPECT_EQ(std::signbit(values[i]), (bits[i] & 0x8000) != 0) << i;
  }
}

TEST_P(SixteenBits, SurviveWideningAndNarrowing) {
  const std::string dtype = GetParam();
  const auto bits = all_bits();
  for (const auto& back :
       {convert<uint16_t>("F64", convert<double>(dtype, bits, "F64"), dtype),
        convert<uint16_t>("F32", convert<float>(dtype, bits, "F32"), dtype)}) {
    for (size_t i = 0; i < bits.size(); ++i) {
      if ((bits[i] & 0x7fff) > infinity(dtype)) {
        EXPECT_GT(back[i] & 0x7fff, infinity(dtype)) << i;
      } else {
        ASSERT_EQ(back[i], bits[i]);
      }
    }
  }
}

// Between two neighbours, the middle rounds to the even one, other values to
// the nearer one.
TEST_P(SixteenBits, RoundToNearestEven) {
  const std::string dtype = GetParam();
  std::vector<double> values;
  std::vector<uint16_t> expected;
  for (int i = 0; i + 1 < infinity(dtype); ++i) {
    const double low = value_of(dtype, static_cast<uint16_t>(i));
    const double high = value_of(dtype, static_cast<uint16_t>(i + 1));
    const double middle = (low + high) / 2;
    for (const auto& [value, nearest] :
         {std::pair{middle, i % 2 == 0 ? i : i + 1},
          {std::nextafter(middle, low), i},
          {std::nextafter(middle, high), i + 1},
          {std::nextafter(low, high), i},
          {std::nextafter(high, low), i + 1}}) {
      for (const int sign : {1, -1}) {
        values.push_back(sign * value);
        expected.push_back(
            static_cast<uint16_t>(nearest | (sign < 0 ? 0x8000 : 0)));
      }
    }
  }
  EXPECT_EQ(convert<uint16_t>("F64", values, dtype), expected);
}

TEST_P(SixteenBits, RoundFloatsLikeDoubles) {
  const std::string dtype = GetParam();
  std::mt19937 random(7);
  std::vector<float> singles;
  for (int i = 0; i < 200000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(value)) singles.push_back(value);
    // Many values in the middle of two.
    const auto middle =
        std::bit_cast<float>(static_cast<uint32_t>(random()) & 0xffff8000);
    if (!std::isnan(middle)) singles.push_back(middle);
  }
  const std::vector<double> doubles(singles.begin(), singles.end());
  EXPECT_EQ(
      convert<uint16_t>("F32", singles, dtype),
      convert<uint16_t>("F64", doubles, dtype));
}

INSTANTIATE_TEST_SUITE_P(
    FloatConvert, SixteenBits, testing::Values("F16", "BF16"),
    [](const auto& info) { return std::string(info.param); });

TEST(FloatConvert, RoundsOnceFromDoubles) {
  // Converted through a float these would be middles and round to even.
  const std::vector<double> values = {
      1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-11 + 0x1p-40};
  EXPECT_EQ(convert<uint16_t>("F64", values, "BF16")[0], 0x3f81);
  EXPECT_EQ(convert<uint16_t>("F64", values, "F16")[1], 0x3c01);
}

TEST(FloatConvert, FindsTheFirstThatIsTooLarge) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {1, infinity, 65519.996f, 65520, 1e30f, NAN};
  std::vector<uint16_t> half(values.size());
  const auto run = [&](const char* dtype) {
    return convert_floats(
        "F32", std::as_bytes(std::span(values)).data(), dtype,
        std::as_writable_bytes(std::span(half)).data(),
        static_cast<int64_t>(values.size()));
  };
  EXPECT_EQ(run("F16"), 3);
  EXPECT_THAT(
      half, testing::ElementsAre(
                0x3c00, 0x7c00, 0x7bff, 0x7c00, 0x7c00, testing::Gt(0x7c00)));
  EXPECT_EQ(run("BF16"), 6);
  values[0] = std::numeric_limits<float>::max();
  EXPECT_EQ(run("BF16"), 0);
  values[0] = std::bit_cast<float>(0x7f7f7fffu);  // rounds down, just
  EXPECT_EQ(run("BF16"), 6);
  const std::vector<double> wide = {1e38, 1e39};
  std::vector<float> single(2);
  EXPECT_EQ(
      convert_floats(
          "F64", std::as_bytes(std::span(wide)).data(), "F32",
          std::as_writable_bytes(std::span(single)).data(), 2),
      1);
}

TEST(FloatConvert, KnowsItsDtypes) {
  EXPECT_TRUE(is_float_dtype("BF16"));
  EXPECT_FALSE(is_float_dtype("I64"));
  EXPECT_EQ(largest_value("F16"), 65504);
  EXPECT_EQ(largest_value("BF16"), 0x1.fep127);
  EXPECT_THAT(
      error_text<ConfigError>([] { largest_value("I64"); }),
      testing::HasSubstr("dtype I64 is no floating-point one"));
}

}  // namespace echelon::float_convert_test
