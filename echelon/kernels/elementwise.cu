// Kernels that read each element once and write it once, where LibTorch's
// operators need several passes and launches: rotary positions, SwiGLU, GELU
// with the gradient of a bias, and dropout with its mask. Compiled after
// numbers.cu.

// The index of the calling thread among those of all blocks.
__device__ inline long long global_thread() {
  return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// --- Rotary positions ---------------------------------------------------------

// The heads [batch, positions, count, size] of one tensor, with its strides in
// elements; the features of a head are adjacent.
template <class T>
struct Heads {
  const T* x;
  long long of_batch;
  long long of_position;
  long long of_head;
  long long count;
};

// (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of each head of
// queries and keys; those of values are copied. All go side by side into one
// tensor. A block has one position of one sample; its threads share out the
// pairs of all heads.
//
//   cosine, sine  [positions, half], contiguous
//   out           [batch, positions, heads of all three, 2 * half], contiguous
//   K             pairs of a thread's turn; it divides half, the strides, and
//                 the addresses in elements; 1 for neighbours
//   neighbours    features 2 i and 2 i + 1 are a pair, not i and i + half
template <class T, int K>
__device__ void rotate(
    Heads<T> queries, Heads<T> keys, Heads<T> values, const float* cosine,
    const float* sine, T* out, long long positions, long long half, float sign,
    bool neighbours) {
  const long long row = blockIdx.x;
  const long long sample = row / positions;
  const long long position = row % positions;
  const int rotated = static_cast<int>(queries.count + keys.count);
  const int heads = rotated + static_cast<int>(values.count);
  out += row * heads * 2 * half;
  cosine += position * half;
  sine += position * half;
  const int turns = static_cast<int>(half / K);
  const int items = heads * turns;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int head = item / turns;
    const int pair = item % turns * K;
    const bool of_query = head < queries.count;
    const bool of_key = !of_query && head < rotated;
    const Heads<T>& source = of_query ? queries : of_key ? keys : values;
    const long long own =
        head - (of_query ? 0 : of_key ? queries.count : rotated);
    const T* from = source.x + sample * source.of_batch +
                    position * source.of_position + own * source.of_head;
    T* to = out + static_cast<long long>(head) * 2 * half;
    const long long first = neighbours ? 2 * pair : pair;
    const long long second = neighbours ? first + 1 : first + half;
    auto a = *reinterpret_cast<const Packet<T, K>*>(from + first);
    auto b = *reinterpret_cast<const Packet<T, K>*>(from + second);
    if (head < rotated) {
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) {
        const float c = cosine[pair + k];
        const float s = sine[pair + k] * sign;
        const float of_a = to_float(a.values[k]);
        const float of_b = to_float(b.values[k]);
        store(a.values[k], of_a * c - of_b * s);
        store(b.values[k], of_b * c + of_a * s);
      }
    }
    *reinterpret_cast<Packet<T, K>*>(to + first) = a;
    *reinterpret_cast<Packet<T, K>*>(to + second) = b;
  }
}

// --- SwiGLU -------------------------------------------------------------------

__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Where a thread works in rows of `width` elements: a block has one of `pieces`
// pieces of one row.
struct PlaceInRow {
  long long row;
  long long column;
};
template <int K>
__device__ inline PlaceInRow place_in_row(unsigned pieces) {
  const long long piece = blockIdx.x % pieces;
  return {
      static_cast<long long>(blockIdx.x / pieces),
      (piece * blockDim.x + threadIdx.x) * K};
}

// gate * sigmoid(gate) * up.
//
//   gate, up  [rows, width], `stride` elements from row to row
//   out       [rows, width], contiguous
//   K         elements of an access; it divides width, stride and the addresses
template <class T, int K>
__device__ void swiglu(
    const T* gate, const T* up, T* out, long long width, long long stride,
    unsigned pieces) {
  const auto [row, column] = place_in_row<K>(pieces);
  if (column >= width) return;
  const long long at = row * stride + column;
  const auto g = *reinterpret_cast<const Packet<T, K>*>(gate + at);
  const auto u = *reinterpret_cast<const Packet<T, K>*>(up + at);
  Packet<T, K> result;
  for (int k = 0; k < K; ++k) {
    const float x = to_float(g.values[k]);
    store(result.values[k], x * sigmoid(x) * to_float(u.values[k]));
  }
  *reinterpret_cast<Packet<T, K>*>(out + row * width + column) = result;
}

// The gradients of swiglu() to gate and to up.
//
//   gradient  [rows, width], contiguous
//   out       [rows, 2 * width], contiguous: the gradients of gate, then of up
template <class T, int K>
__device__ void swiglu_gradient(
    const T* gradient, const T* gate, const T* up, T* out, long long width,
    long long stride, unsigned pieces) {
  const auto [row, column] = place_in_row<K>(pieces);
  if (column >= width) return;
  const long long at = row * stride + column;
  const auto d =
      *reinterpret_cast<const Packet<T, K>*>(gradient + row * width + column);
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
  out += row * 2 * width + column;
  *reinterpret_cast<Packet<T, K>*>(out) = of_gate;
  *reinterpret_cast<Packet<T, K>*>(out + width) = of_up;
}

// --- GELU ---------------------------------------------------------------------

// GELU's tanh form is x times this share, (1 + tanh(inner)) / 2 with
// inner = sqrt(2 / pi) (x + 0.044715 x^3). Hendrycks and Gimpel, "Gaussian Error
// Linear Units", 2016, arXiv:1606.08415, section 2.
constexpr float kGeluSlope = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float kGeluCube = 0.044715f;
__device__ inline float gelu_share(float x) {
  return sigmoid(kGeluSlope * (x + kGeluCube * x * x * x));
}

// GELU of n elements. Writes 0 to the `tiles` counters of gelu_gradient().
// K divides n and the addresses.
template <class T, int K>
__device__ void gelu(
    const T* x, T* out, unsigned* counters, long long n, int tiles) {
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) counters[i] = 0;
  }
  const long long at = global_thread() * K;
  if (at >= n) return;
  const auto in = *reinterpret_cast<const Packet<T, K>*>(x + at);
  Packet<T, K> result;
  for (int k = 0; k < K; ++k) {
    const float value = to_float(in.values[k]);
    store(result.values[k], value * gelu_share(value));
  }
  *reinterpret_cast<Packet<T, K>*>(out + at) = result;
}

constexpr int kGeluThreads = 256;  // of a block, at most: kElementwiseThreads
constexpr int kGeluLanes = 32;     // of them side by side in a row

// The sums over the rows of a block's threads, in the threads of its first row.
template <int K>
__device__ inline void add_rows_of_block(float (&sums)[K]) {
  __shared__ float all[K * kGeluThreads];
  const int thread = threadIdx.x;
  __syncthreads();  // the sums before these have been read
  ECHELON_UNROLL
  for (int k = 0; k < K; ++k) all[k * kGeluThreads + thread] = sums[k];
  __syncthreads();
  for (int half = blockDim.x / 2; half >= kGeluLanes; half /= 2) {
    if (thread < half) {
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) {
        all[k * kGeluThreads + thread] += all[k * kGeluThreads + thread + half];
      }
    }
    __syncthreads();
  }
  ECHELON_UNROLL
  for (int k = 0; k < K; ++k) sums[k] = all[k * kGeluThreads + thread];
}

// The gradient of gelu() to x, and its sum over the rows, which is the gradient
// of a bias that x has. A block has a tile of kGeluLanes * K columns, and every
// parts-th of the sets of rows that its threads have at a time. The last block
// of a tile to end adds up the sums of the tile's blocks; their order does not
// depend on which block that is.
//
//   gradient, x  [rows, width], contiguous
//   partial      [parts, width]: room for each block's sums
//   counters     one for each tile, gelu()'s
//   K            elements of an access; it divides width and the addresses
template <class T, int K>
__device__ void gelu_gradient(
    const T* gradient, const T* x, T* out, float* partial, T* for_bias,
    unsigned* counters, long long rows, long long width, int parts) {
  const int tiles =
      static_cast<int>((width + kGeluLanes * K - 1) / (kGeluLanes * K));
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int part = static_cast<int>(blockIdx.x) / tiles;
  const int lane = static_cast<int>(threadIdx.x) % kGeluLanes;
  const int first = static_cast<int>(threadIdx.x) / kGeluLanes;
  const int at_once = blockDim.x / kGeluLanes;  // rows
  const long long column =
      (static_cast<long long>(tile) * kGeluLanes + lane) * K;
  const bool inside = column < width;
  float sums[K] = {};
  for (long long row = static_cast<long long>(part) * at_once + first;
       inside && row < rows; row += static_cast<long long>(parts) * at_once) {
    const long long at = row * width + column;
    const auto d = *reinterpret_cast<const Packet<T, K>*>(gradient + at);
    const auto v = *reinterpret_cast<const Packet<T, K>*>(x + at);
    Packet<T, K> result;
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) {
      const float value = to_float(v.values[k]);
      const float share = gelu_share(value);
      const float steep = kGeluSlope * (1 + 3 * kGeluCube * value * value);
      const float slope =
          to_float(d.values[k]) *
          (share + value * (share * (1 - share)) * steep);
      store(result.values[k], slope);
      sums[k] += slope;
    }
    *reinterpret_cast<Packet<T, K>*>(out + at) = result;
  }
  add_rows_of_block(sums);
  const bool writes = inside && first == 0;
  if (writes) {
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) partial[part * width + column + k] = sums[k];
  }
  if (!is_last_block(counters + tile, parts)) return;
  ECHELON_UNROLL
  for (int k = 0; k < K; ++k) sums[k] = 0;
  for (int one = first; inside && one < parts; one += at_once) {
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) sums[k] += partial[one * width + column + k];
  }
  add_rows_of_block(sums);
  if (!writes) return;
  ECHELON_UNROLL
  for (int k = 0; k < K; ++k) store(for_bias[column + k], sums[k]);
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

// x * scale where kept, else 0, of n elements, plus `residual` unless it is
// null. K divides n and the addresses.
template <class T, int K>
__device__ void dropout(
    const T* x, const unsigned char* keep, const T* residual, T* out,
    long long n, float scale) {
  const long long at = global_thread() * K;
  if (at >= n) return;
  const auto in = *reinterpret_cast<const Packet<T, K>*>(x + at);
  const auto kept = *reinterpret_cast<const Packet<unsigned char, K>*>(keep + at);
  Packet<T, K> more;
  if (residual != nullptr) {
    more = *reinterpret_cast<const Packet<T, K>*>(residual + at);
  }
  Packet<T, K> result;
  for (int k = 0; k < K; ++k) {
    const float value = kept.values[k] != 0 ? to_float(in.values[k]) * scale : 0;
    store(
        result.values[k],
        residual != nullptr ? value + to_float(more.values[k]) : value);
  }
  *reinterpret_cast<Packet<T, K>*>(out + at) = result;
}

// Each kernel for one element in turn, and for as many as 16 bytes have.
#define ECHELON_ELEMENTWISE_OF(name, T, K)                                    \
  extern "C" __global__ void rotate_##name(                                   \
      Heads<T> queries, Heads<T> keys, Heads<T> values, const float* cosine,  \
      const float* sine, T* out, long long positions, long long half,         \
      float sign, int neighbours) {                                           \
    rotate<T, K>(                                                             \
        queries, keys, values, cosine, sine, out, positions, half, sign,      \
        neighbours != 0);                                                     \
  }                                                                           \
  extern "C" __global__ void swiglu_##name(                                   \
      const T* gate, const T* up, T* out, long long width, long long stride,  \
      unsigned pieces) {                                                      \
    swiglu<T, K>(gate, up, out, width, stride, pieces);                       \
  }                                                                           \
  extern "C" __global__ void swiglu_gradient_##name(                          \
      const T* gradient, const T* gate, const T* up, T* out, long long width, \
      long long stride, unsigned pieces) {                                    \
    swiglu_gradient<T, K>(gradient, gate, up, out, width, stride, pieces);    \
  }                                                                           \
  extern "C" __global__ void gelu_##name(                                     \
      const T* x, T* out, unsigned* counters, long long n, int tiles) {       \
    gelu<T, K>(x, out, counters, n, tiles);                                   \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(kGeluThreads)                  \
      gelu_gradient_##name(                                                   \
          const T* gradient, const T* x, T* out, float* partial, T* for_bias, \
          unsigned* counters, long long rows, long long width, int parts) {   \
    gelu_gradient<T, K>(                                                      \
        gradient, x, out, partial, for_bias, counters, rows, width, parts);   \
  }                                                                           \
  extern "C" __global__ void dropout_##name(                                  \
      const T* x, const unsigned char* keep, const T* residual, T* out,       \
      long long n, float scale) {                                             \
    dropout<T, K>(x, keep, residual, out, n, scale);                          \
  }
#define ECHELON_ELEMENTWISE(name, T)        \
  ECHELON_ELEMENTWISE_OF(name, T, 1)        \
  ECHELON_ELEMENTWISE_OF(name##_packets, T, 16 / sizeof(T))
ECHELON_ELEMENTWISE(float, float)
ECHELON_ELEMENTWISE(bfloat16, BFloat16)
ECHELON_ELEMENTWISE(half, Half)
