#include "echelon/checkpoint/float_values.h"

#include <cstring>

namespace echelon {
namespace {

double from_f32_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

double from_bf16_bits(uint16_t bits) {
  return from_f32_bits(static_cast<uint32_t>(bits) << 16);
}

// 1 bit of sign, 5 of exponent with bias 15, 10 of fraction.
double from_f16_bits(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1F;
  const uint32_t fraction = bits & 0x3FF;
  if (exponent == 0) {  // 0 and subnormal: whole multiples of 2^-24
    const double value = fraction * 0x1p-24;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = exponent == 0x1F ? 0xFF : exponent + 127 - 15;
  return from_f32_bits(sign | wide << 23 | fraction << 13);
}

template <typename Bits, typename Convert>
void read_as(
    const std::byte* bytes, size_t count, double* values, Convert convert) {
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * sizeof(Bits), sizeof(Bits));
    values[i] = convert(bits);
  }
}

}  // namespace

bool is_float(std::string_view dtype) {
  return dtype == "F64" || dtype == "F32" || dtype == "F16" || dtype == "BF16";
}

bool read_floats(
    std::string_view dtype,
    const std::byte* bytes,
    size_t count,
    double* values) {
  if (dtype == "F64") {
    std::memcpy(values, bytes, count * sizeof(double));
  } else if (dtype == "F32") {
    read_as<uint32_t>(bytes, count, values, from_f32_bits);
  } else if (dtype == "F16") {
    read_as<uint16_t>(bytes, count, values, from_f16_bits);
  } else if (dtype == "BF16") {
    read_as<uint16_t>(bytes, count, values, from_bf16_bits);
  } else {
    return false;
  }
  return true;
}

}  // namespace echelon
