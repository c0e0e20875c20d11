// Matrices of 16 or 32 bits to 8: the largest magnitude, and then the rounded
// numbers, row by row and transposed, since products read a matrix along their
// sums from either side. Compiled after numbers.cu.

// The bits of a magnitude grow with it, also those of infinity and NaN.
__device__ inline unsigned magnitude_bits(float x) {
  return __builtin_bit_cast(unsigned, x) & 0x7fffffff;
}

constexpr int kLargestThreads = 256;  // of a block: kLargestThreads of fp8.cpp

// The largest magnitude of n numbers, as bits, and of what *out has.
//
//   blocks  of the launch
//   K       elements of an access; it divides n and the address
template <class T, int K>
__device__ void largest_magnitude(
    const T* x, unsigned* out, long long n, long long blocks) {
  __shared__ unsigned all[kLargestThreads];
  const int thread = threadIdx.x;
  unsigned mine = 0;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x;
  for (long long at = (first + thread) * K; at < n;
       at += blocks * blockDim.x * K) {
    const auto some = *reinterpret_cast<const Packet<T, K>*>(x + at);
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) {
      const unsigned bits = magnitude_bits(to_float(some.values[k]));
      if (bits > mine) mine = bits;
    }
  }
  all[thread] = mine;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (thread < half && all[thread + half] > all[thread]) {
      all[thread] = all[thread + half];
    }
    __syncthreads();
  }
  if (thread == 0) atomicMax(out, all[0]);
}

// To the nearest number of 4 bits of exponent and 3 of fraction, and of two to
// the even one. |x| is at most the largest, 448, but for its own rounding.
__device__ inline unsigned char to_e4m3(float x) {
  const unsigned sign = __builtin_bit_cast(unsigned, x) >> 24 & 0x80;
  unsigned bits = magnitude_bits(x);
  if (bits >= 0x7f800000) return sign | 0x7f;  // NaN
  if (bits < 0x3c800000) {
    // Below 2^-6 steps are 2^-9, as those of float32 are from 2^14 on.
    const float steps = __builtin_bit_cast(float, bits) + 16384.0f;
    return sign | (__builtin_bit_cast(unsigned, steps) - 0x46800000);
  }
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | ((bits >> 20) - (120 << 3));
}

// The same with 5 bits of exponent and 2 of fraction; the largest is 57344.
__device__ inline unsigned char to_e5m2(float x) {
  const unsigned sign = __builtin_bit_cast(unsigned, x) >> 24 & 0x80;
  unsigned bits = magnitude_bits(x);
  if (bits >= 0x7f800000) return sign | 0x7f;
  if (bits < 0x38800000) {
    // Below 2^-14 steps are 2^-16, as those of float32 are from 2^7 on.
    const float steps = __builtin_bit_cast(float, bits) + 128.0f;
    return sign | (__builtin_bit_cast(unsigned, steps) - 0x43000000);
  }
  bits += 0xfffff + (bits >> 21 & 1);
  return sign | ((bits >> 21) - (112 << 2));
}

constexpr int kTile = 64;      // rows and columns of a block
constexpr int kOfThread = 16;  // numbers of a row that a thread rounds

// x / scale, rounded; scale is such that the largest magnitude becomes the
// largest number of the format.
//
//   x           [rows, columns], contiguous; the address and columns are
//               multiples of 16
//   largest     the bits of the largest magnitude
//   row_major   [rows, columns], or null
//   transposed  [columns, rows], or null; rows are then a multiple of 16
//   across      tiles beside each other
template <class T, bool kGradient>
__device__ void to_fp8(
    const T* x, const unsigned* largest, unsigned char* row_major,
    unsigned char* transposed, float* scale, long long rows, long long columns,
    unsigned across) {
  __shared__ unsigned char tile[kTile][kTile + 4];
  const float most = __builtin_bit_cast(float, *largest);
  // NaN stays NaN.
  const float unit =
      (most <= 1e-30f ? 1e-30f : most) / (kGradient ? 57344.0f : 448.0f);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = unit;
  const long long first_row =
      static_cast<long long>(blockIdx.x / across) * kTile;
  const long long first_column =
      static_cast<long long>(blockIdx.x % across) * kTile;
  const int line = threadIdx.x / (kTile / kOfThread);
  const int begin = threadIdx.x % (kTile / kOfThread) * kOfThread;

  const long long row = first_row + line;
  const long long column = first_column + begin;
  if (row < rows && column < columns) {
    constexpr int kPacket = Packet<T>::kSize;
    Packet<unsigned char, kOfThread> result;
    ECHELON_UNROLL
    for (int p = 0; p < kOfThread / kPacket; ++p) {
      const auto some = *reinterpret_cast<const Packet<T>*>(
          x + row * columns + column + p * kPacket);
      ECHELON_UNROLL
      for (int k = 0; k < kPacket; ++k) {
        const float quotient = to_float(some.values[k]) / unit;
        result.values[p * kPacket + k] =
            kGradient ? to_e5m2(quotient) : to_e4m3(quotient);
      }
    }
    if (row_major != nullptr) {
      *reinterpret_cast<Packet<unsigned char, kOfThread>*>(
          row_major + row * columns + column) = result;
    }
    ECHELON_UNROLL
    for (int k = 0; k < kOfThread; ++k) {
      tile[line][begin + k] = result.values[k];
    }
  }
  if (transposed == nullptr) return;
  __syncthreads();
  const long long to_row = first_column + line;
  const long long to_column = first_row + begin;
  if (to_row < columns && to_column < rows) {
    Packet<unsigned char, kOfThread> result;
    ECHELON_UNROLL
    for (int k = 0; k < kOfThread; ++k) {
      result.values[k] = tile[begin + k][line];
    }
    *reinterpret_cast<Packet<unsigned char, kOfThread>*>(
        transposed + to_row * rows + to_column) = result;
  }
}

#define ECHELON_FP8_OF(name, T, format, gradient)                            \
  extern "C" __global__ void to_##format##_##name(                           \
      const T* x, const unsigned* largest, unsigned char* row_major,         \
      unsigned char* transposed, float* scale, long long rows,               \
      long long columns, unsigned across) {                                  \
    to_fp8<T, gradient>(                                                     \
        x, largest, row_major, transposed, scale, rows, columns, across);    \
  }
#define ECHELON_FP8(name, T)                                                 \
  extern "C" __global__ void largest_magnitude_##name(                       \
      const T* x, unsigned* out, long long n, long long blocks) {            \
    largest_magnitude<T, Packet<T>::kSize>(x, out, n, blocks);               \
  }                                                                          \
  ECHELON_FP8_OF(name, T, e4m3, false)                                       \
  ECHELON_FP8_OF(name, T, e5m2, true)
ECHELON_FP8(float, float)
ECHELON_FP8(bfloat16, BFloat16)
ECHELON_FP8(half, Half)
