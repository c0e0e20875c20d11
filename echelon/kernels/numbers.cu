// What the kernels share: 16-bit numbers, which they compute with in float32,
// accesses of 16 bytes, and how a kernel finds the last of its blocks.
//
// NVRTC compiles this text followed by a file of kernels, without any header.
// Tests also compile both as C++ for the host, with __shared__ variables that
// are static.

struct BFloat16 {
  unsigned short bits;
};
struct Half {
  unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(BFloat16 x) {
  return __builtin_bit_cast(float, static_cast<unsigned>(x.bits) << 16);
}
__device__ inline float to_float(Half x) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  return half_to_float(x.bits);
#endif
}

__device__ inline void store(float& to, float x) { to = x; }
__device__ inline void store(BFloat16& to, float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  // To the nearest, and of two to the even one. NaN stays NaN.
  to.bits = x != x ? 0x7fff
                   : static_cast<unsigned short>(
                         (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
__device__ inline void store(Half& to, float x) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  to.bits = float_to_half(x);
#endif
}

// K elements that are moved in one access; by default as many as 16 bytes have.
template <class T, int K = 16 / sizeof(T)>
struct alignas(sizeof(T) * K) Packet {
  static constexpr int kSize = K;
  T values[K];
};

// Before a loop whose steps are known to the compiler: without loops, arrays of
// a thread stay in registers.
#ifdef __CUDA_ARCH__
#define ECHELON_UNROLL _Pragma("unroll")
#else
#define ECHELON_UNROLL
#endif

// Whether the calling block is the last of `count` blocks that call this with
// the same counter. Its threads then see what the threads of the others wrote
// before. No block waits. The counter is 0 before the first block and after the
// last, so that the next kernel finds it as this one did.
__device__ inline bool is_last_block(unsigned* counter, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned others = static_cast<unsigned>(count - 1);
    __threadfence();
    last = atomicInc(counter, others) == others;
    __threadfence();
  }
  __syncthreads();
  return last;
}
