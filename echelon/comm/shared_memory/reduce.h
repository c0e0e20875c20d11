// Reductions over the ranks' buffers, element by element in rank order: the
// same bits on every rank, whatever the path the bytes took.
//
// sum, avg   bfloat16 and float16 add in float32 and round once; 8- to 32-bit
//            integers add in a wider type and wrap at the end; avg divides the
//            sum by the number of ranks (integers: towards zero)
// min, max   a NaN of any rank wins, so that it is not hidden
// bool       sum and max are "or", min is "and"; the callers refuse avg
//
// The loops are compiled three times (any x86-64; AVX2 and F16C; AVX-512); the
// CPU at hand decides once which are used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace echelon::local {

enum class Dtype : uint8_t {
  float32,
  float64,
  bfloat16,
  float16,
  int8,
  uint8,
  int16,
  int32,
  int64,
  boolean
};
enum class Reduction : uint8_t { sum, avg, min, max };

size_t size_of(Dtype dtype);        // bytes of one element
const char* name_of(Dtype dtype);   // "float32"
const char* name_of(Reduction op);  // "sum"

/// The memory of one reduction. An output may be one of the inputs, and no
/// other overlap is allowed.
struct Buffers {
  int num_inputs = 0;
  const void* const* inputs = nullptr;
  int num_outputs = 0;
  void* const* outputs = nullptr;
  size_t count = 0;  // elements of each
};

/// outputs[*][i] <- op over inputs[0..num_inputs)[i], for i in [0, count).
void reduce(Dtype dtype, Reduction op, Buffers buffers);

/// The kernels that are used here: "x86-64", "avx2" or "avx512".
const char* reduce_kernels();

namespace detail {

void reduce_baseline(Dtype dtype, Reduction op, Buffers buffers);
void reduce_avx2(Dtype dtype, Reduction op, Buffers buffers);
void reduce_avx512(Dtype dtype, Reduction op, Buffers buffers);

}  // namespace detail
}  // namespace echelon::local
