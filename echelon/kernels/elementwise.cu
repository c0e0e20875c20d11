// Kernels that read each element once and write it once, where LibTorch's
// operators need several passes and launches: rotary positions, SwiGLU, and
// dropout with its mask. Compiled after numbers.cu.

// The index of the calling thread among those of all blocks.
__device__ inline long long global_thread() {
  return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// --- Rotary positions ---------------------------------------------------------

// (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of each head. A block
// has one position of one sample; its threads share out the heads' pairs.
//
//   x             [batch, positions, heads, 2 * half], features adjacent
//   cosine, sine  [positions, half], contiguous
//   out           as x, contiguous
//   K             pairs of a thread's turn; it divides half, the strides of x,
//                 and the addresses in elements; 1 for neighbours
//   neighbours    features 2 i and 2 i + 1 are a pair, not i and i + half
template <class T, int K>
__device__ void rotate(
    const T* x, const float* cosine, const float* sine, T* out,
    long long positions, long long heads, long long half,
    long long batch_stride, long long position_stride, long long head_stride,
    float sign, bool neighbours) {
  const long long row = blockIdx.x;
  const long long position = row % positions;
  x += row / positions * batch_stride + position * position_stride;
  out += row * heads * 2 * half;
  cosine += position * half;
  sine += position * half;
  const int turns = static_cast<int>(half / K);
  const int items = static_cast<int>(heads) * turns;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int head = item / turns;
    const int pair = item % turns * K;
    const T* from = x + head * head_stride;
    T* to = out + head * 2 * half;
    const long long first = neighbours ? 2 * pair : pair;
    const long long second = neighbours ? first + 1 : first + half;
    const auto a = *reinterpret_cast<const Packet<T, K>*>(from + first);
    const auto b = *reinterpret_cast<const Packet<T, K>*>(from + second);
    Packet<T, K> a_out;
    Packet<T, K> b_out;
    for (int k = 0; k < K; ++k) {
      const float c = cosine[pair + k];
      const float s = sine[pair + k] * sign;
      const float of_a = to_float(a.values[k]);
      const float of_b = to_float(b.values[k]);
      store(a_out.values[k], of_a * c - of_b * s);
      store(b_out.values[k], of_b * c + of_a * s);
    }
    *reinterpret_cast<Packet<T, K>*>(to + first) = a_out;
    *reinterpret_cast<Packet<T, K>*>(to + second) = b_out;
  }
}

// --- SwiGLU -------------------------------------------------------------------

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// gate * sigmoid(gate) * up of n elements. K divides n and the addresses.
template <class T, int K>
__device__ void swiglu(const T* gate, const T* up, T* out, long long n) {
  const long long at = global_thread() * K;
  if (at >= n) return;
  const auto g = *reinterpret_cast<const Packet<T, K>*>(gate + at);
  const auto u = *reinterpret_cast<const Packet<T, K>*>(up + at);
  Packet<T, K> result;
  for (int k = 0; k < K; ++k) {
    const float x = to_float(g.values[k]);
    store(result.values[k], x * sigmoid(x) * to_float(u.values[k]));
  }
  *reinterpret_cast<Packet<T, K>*>(out + at) = result;
}

template <class T, int K>
__device__ void swiglu_gradient(
    const T* gradient, const T* gate, const T* up, T* to_gate, T* to_up,
    long long n) {
  const long long at = global_thread() * K;
  if (at >= n) return;
  const auto d = *reinterpret_cast<const Packet<T, K>*>(gradient + at);
  const auto g = *reinterpret_cast<const Packet<T, K>*>(gate + at);
  const auto u = *reinterpret_cast<const Packet<T, K>*>(up + at);
  Packet<T, K> of_gate;
  Packet<T, K> of_up;
  for (int k = 0; k < K; ++k) {
    const float slope = to_float(d.values[k]);
    const float x = to_float(g.values[k]);
    const float share = sigmoid(x);
    store(
        of_gate.values[k],
        slope * to_float(u.values[k]) * share * (1 + x * (1 - share)));
    store(of_up.values[k], slope * x * share);
  }
  *reinterpret_cast<Packet<T, K>*>(to_gate + at) = of_gate;
  *reinterpret_cast<Packet<T, K>*>(to_up + at) = of_up;
}

// --- Dropout ------------------------------------------------------------------

// The four words that Philox4x32-10 gives for a counter (layers/philox.h).
__device__ inline void philox(
    unsigned long long key, unsigned long long subsequence,
    unsigned long long counter, unsigned (&words)[4]) {
  unsigned a = static_cast<unsigned>(counter);
  unsigned b = static_cast<unsigned>(counter >> 32);
  unsigned c = static_cast<unsigned>(subsequence);
  unsigned d = static_cast<unsigned>(subsequence >> 32);
  unsigned key_low = static_cast<unsigned>(key);
  unsigned key_high = static_cast<unsigned>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned long long p = 0xD2511F53ull * a;
    const unsigned long long q = 0xCD9E8D57ull * c;
    a = static_cast<unsigned>(q >> 32) ^ b ^ key_low;
    c = static_cast<unsigned>(p >> 32) ^ d ^ key_high;
    b = static_cast<unsigned>(q);
    d = static_cast<unsigned>(p);
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  words[0] = a;
  words[1] = b;
  words[2] = c;
  words[3] = d;
}

// 1 where an element's word is at least the threshold, else 0. A thread has the
// elements of one counter in one row: `counters` threads a row are enough for
// every alignment.
//
//   first, sample_key  [rows]: where the row begins in its sample's stream, and
//                      the sample's key
//   keep               [rows, width]
extern "C" __global__ void dropout_mask(
    const long long* first, const long long* sample_key, unsigned char* keep,
    long long rows, long long width, long long counters,
    unsigned long long stream, unsigned threshold) {
  const long long item = global_thread();
  const long long row = item / counters;
  if (row >= rows) return;
  const long long begin = first[row];
  const long long counter = begin / 4 + item % counters;
  unsigned words[4];
  philox(
      stream, static_cast<unsigned long long>(sample_key[row]),
      static_cast<unsigned long long>(counter), words);
  const long long at = counter * 4 - begin;
  unsigned char* to = keep + row * width + at;
  if (at >= 0 && at + 4 <= width &&
      reinterpret_cast<unsigned long long>(to) % 4 == 0) {
    Packet<unsigned char, 4> all;
    for (int k = 0; k < 4; ++k) all.values[k] = words[k] >= threshold;
    *reinterpret_cast<Packet<unsigned char, 4>*>(to) = all;
    return;
  }
  for (int k = 0; k < 4; ++k) {
    if (at + k >= 0 && at + k < width) to[k] = words[k] >= threshold;
  }
}

// x * scale where kept, else 0, of n elements. K divides n and the addresses.
template <class T, int K>
__device__ void dropout(
    const T* x, const unsigned char* keep, T* out, long long n, float scale) {
  const long long at = global_thread() * K;
  if (at >= n) return;
  const auto in = *reinterpret_cast<const Packet<T, K>*>(x + at);
  const auto kept = *reinterpret_cast<const Packet<unsigned char, K>*>(keep + at);
  Packet<T, K> result;
  for (int k = 0; k < K; ++k) {
    store(
        result.values[k],
        kept.values[k] != 0 ? to_float(in.values[k]) * scale : 0);
  }
  *reinterpret_cast<Packet<T, K>*>(out + at) = result;
}

// Each kernel for one element in turn, and for as many as 16 bytes have.
#define ECHELON_ELEMENTWISE_OF(name, T, K)                                    \
  extern "C" __global__ void rotate_##name(                                   \
      const T* x, const float* cosine, const float* sine, T* out,             \
      long long positions, long long heads, long long half,                   \
      long long batch_stride, long long position_stride,                      \
      long long head_stride, float sign, int neighbours) {                    \
    rotate<T, K>(                                                             \
        x, cosine, sine, out, positions, heads, half, batch_stride,           \
        position_stride, head_stride, sign, neighbours != 0);                 \
  }                                                                           \
  extern "C" __global__ void swiglu_##name(                                   \
      const T* gate, const T* up, T* out, long long n) {                      \
    swiglu<T, K>(gate, up, out, n);                                           \
  }                                                                           \
  extern "C" __global__ void swiglu_gradient_##name(                          \
      const T* gradient, const T* gate, const T* up, T* to_gate, T* to_up,    \
      long long n) {                                                          \
    swiglu_gradient<T, K>(gradient, gate, up, to_gate, to_up, n);             \
  }                                                                           \
  extern "C" __global__ void dropout_##name(                                  \
      const T* x, const unsigned char* keep, T* out, long long n,             \
      float scale) {                                                          \
    dropout<T, K>(x, keep, out, n, scale);                                    \
  }
#define ECHELON_ELEMENTWISE(name, T)        \
  ECHELON_ELEMENTWISE_OF(name, T, 1)        \
  ECHELON_ELEMENTWISE_OF(name##_packets, T, 16 / sizeof(T))
ECHELON_ELEMENTWISE(float, float)
ECHELON_ELEMENTWISE(bfloat16, BFloat16)
ECHELON_ELEMENTWISE(half, Half)
