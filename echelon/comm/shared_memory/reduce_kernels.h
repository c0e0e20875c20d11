// The loops of reduce.h, compiled once per instruction set: each including .cpp
// defines ECHELON_REDUCE as the name of its entry. Everything else is in an
// unnamed namespace and nothing of the standard library is called, so that no
// code for a newer CPU can be linked into the rest of the program.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "echelon/comm/shared_memory/reduce.h"

namespace echelon::local::detail {
namespace {

constexpr size_t kBlock = 256;  // elements kept in the first-level cache

// How a dtype is stored, the type of its sums, and the conversions.
template <class T, class A>
struct Number {
  using Stored = T;
  using Sum = A;
  static void load(const T* from, A* to, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<A>(from[i]);
  }
  static void store(const A* from, T* to, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i]);
  }
};

struct Int64 : Number<int64_t, int64_t> {};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static void load(const uint16_t* from, float* to, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      __builtin_memcpy(&to[i], &bits, 4);
    }
  }
  static void store(const float* from, uint16_t* to, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, &from[i], 4);
      const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
      to[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
    }
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Sum = float;

  static float load_one(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
    // A half's exponent, read as a float's, is 2^112 too small.
    uint32_t bits = magnitude;
    float value;
    if (magnitude >= 0x0f800000u) {  // infinity and NaN
      bits = magnitude | 0x7f800000u;
      __builtin_memcpy(&value, &bits, 4);
    } else {
      __builtin_memcpy(&value, &bits, 4);
      value *= 0x1p112f;
    }
    __builtin_memcpy(&bits, &value, 4);
    bits |= sign;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  }

  static uint16_t store_one(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00;
    if (bits >= 0x477ff000u) return sign | 0x7c00;  // rounds to infinity
    if (bits < 0x38800000u) {                       // subnormal: 2^-24 steps
      float magnitude;
      __builtin_memcpy(&magnitude, &bits, 4);
      // Adding 1/2 leaves 2^-24 as the last bit, rounded to nearest even.
      const float shifted = magnitude + 0.5f;
      uint32_t steps;
      __builtin_memcpy(&steps, &shifted, 4);
      return sign | static_cast<uint16_t>(steps - 0x3f000000u);
    }
    const uint32_t rounded = bits + 0xfff + ((bits >> 13) & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
  }

  static void load(const uint16_t* from, float* to, size_t n) {
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
      _mm512_storeu_ps(
          to + i, _mm512_cvtph_ps(_mm256_loadu_si256(
                      reinterpret_cast<const __m256i*>(from + i))));
    }
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(
          to + i, _mm256_cvtph_ps(_mm_loadu_si128(
                      reinterpret_cast<const __m128i*>(from + i))));
    }
#endif
    for (; i < n; ++i) to[i] = load_one(from[i]);
  }
  static void store(const float* from, uint16_t* to, size_t n) {
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(to + i),
          _mm512_cvtps_ph(
              _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(to + i),
          _mm256_cvtps_ph(
              _mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < n; ++i) to[i] = store_one(from[i]);
  }
};

struct Adds {
  // Unsigned, so that a sum of integers wraps instead of being undefined.
  static int64_t apply(int64_t a, int64_t v) {
    return static_cast<int64_t>(
        static_cast<uint64_t>(a) + static_cast<uint64_t>(v));
  }
  static int32_t apply(int32_t a, int32_t v) { return a + v; }
  static float apply(float a, float v) { return a + v; }
  static double apply(double a, double v) { return a + v; }
};
struct Lesser {
  template <class A>
  static A apply(A a, A v) {
    return (v < a || v != v) ? v : a;
  }
};
struct Greater {
  template <class A>
  static A apply(A a, A v) {
    return (v > a || v != v) ? v : a;
  }
};

template <class T>
void copy_out(const T* block, const Buffers& to, size_t at, size_t n) {
  for (int j = 0; j < to.num_outputs; ++j) {
    __builtin_memcpy(static_cast<T*>(to.outputs[j]) + at, block, n * sizeof(T));
  }
}

template <class D, class Combine>
void reduce_blocks(const Buffers buffers, bool average) {
  using T = typename D::Stored;
  using A = typename D::Sum;
  alignas(64) A sum[kBlock];
  alignas(64) A value[kBlock];
  alignas(64) T out[kBlock];
  const void* const* inputs = buffers.inputs;
  for (size_t at = 0; at < buffers.count; at += kBlock) {
    const size_t n = buffers.count - at < kBlock ? buffers.count - at : kBlock;
    D::load(static_cast<const T*>(inputs[0]) + at, sum, n);
    for (int j = 1; j < buffers.num_inputs; ++j) {
      D::load(static_cast<const T*>(inputs[j]) + at, value, n);
      for (size_t i = 0; i < n; ++i) {
        sum[i] = Combine::apply(sum[i], value[i]);
      }
    }
    if (average) {
      const A divisor = static_cast<A>(buffers.num_inputs);
      for (size_t i = 0; i < n; ++i) sum[i] /= divisor;
    }
    D::store(sum, out, n);
    copy_out(out, buffers, at, n);
  }
}

// The common case, for a fixed number of inputs: one pass in registers.
template <int N, class T>
void sum_of(const Buffers buffers) {
  alignas(64) T out[kBlock];
  const T* in[N];
  for (size_t at = 0; at < buffers.count; at += kBlock) {
    const size_t n = buffers.count - at < kBlock ? buffers.count - at : kBlock;
    for (int j = 0; j < N; ++j) {
      in[j] = static_cast<const T*>(buffers.inputs[j]) + at;
    }
    for (size_t i = 0; i < n; ++i) {
      T sum = in[0][i];
      for (int j = 1; j < N; ++j) sum += in[j][i];
      out[i] = sum;
    }
    copy_out(out, buffers, at, n);
  }
}

template <class D>
void dispatch(Reduction op, const Buffers& buffers) {
  switch (op) {
    case Reduction::sum:
    case Reduction::avg:
      return reduce_blocks<D, Adds>(buffers, op == Reduction::avg);
    case Reduction::min:
      return reduce_blocks<D, Lesser>(buffers, false);
    case Reduction::max:
      return reduce_blocks<D, Greater>(buffers, false);
  }
}

template <class T>
void dispatch_float(Reduction op, const Buffers& buffers) {
  if (op == Reduction::sum) {
    switch (buffers.num_inputs) {
      case 2:
        return sum_of<2, T>(buffers);
      case 3:
        return sum_of<3, T>(buffers);
      case 4:
        return sum_of<4, T>(buffers);
    }
  }
  dispatch<Number<T, T>>(op, buffers);
}

}  // namespace

void ECHELON_REDUCE(Dtype dtype, Reduction op, Buffers buffers) {
  switch (dtype) {
    case Dtype::float32:
      return dispatch_float<float>(op, buffers);
    case Dtype::float64:
      return dispatch_float<double>(op, buffers);
    case Dtype::bfloat16:
      return dispatch<BFloat16>(op, buffers);
    case Dtype::float16:
      return dispatch<Float16>(op, buffers);
    case Dtype::int8:
      return dispatch<Number<int8_t, int32_t>>(op, buffers);
    case Dtype::uint8:
      return dispatch<Number<uint8_t, int32_t>>(op, buffers);
    case Dtype::int16:
      return dispatch<Number<int16_t, int32_t>>(op, buffers);
    case Dtype::int32:
      return dispatch<Number<int32_t, int64_t>>(op, buffers);
    case Dtype::int64:
      return dispatch<Int64>(op, buffers);
    case Dtype::boolean:
      // Zeros and ones: "or" is the greater, "and" the lesser.
      return dispatch<Number<uint8_t, int32_t>>(
          op == Reduction::min ? op : Reduction::max, buffers);
  }
}

}  // namespace echelon::local::detail
