// Norms over the features of a token, with the residual sum before them: a
// block of threads has a row, which its threads keep in registers, so that
// forward reads and writes each tensor once. Backward is one pass too: blocks
// have several rows each and keep their sums for the gradients of weight and
// bias, which a second kernel adds up. Compiled after numbers.cu.

constexpr int kNormThreads = 512;  // of a block, at most: kNormThreads of norm.h

// Elements of a row for each thread: kNormValues of norm.h. Single accesses have
// an address each, which need registers too.
template <int K>
constexpr int kNormValues = K == 1 ? 8 : 16;

struct Two {
  float a;
  float b;
};

// The sums over a block's threads, whose number is a power of 2, in each.
__device__ inline Two sums_of_block(Two mine) {
  __shared__ float first[kNormThreads];
  __shared__ float second[kNormThreads];
  const int thread = threadIdx.x;
  __syncthreads();  // the sums before these have been read
  first[thread] = mine.a;
  second[thread] = mine.b;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (thread < half) {
      first[thread] += first[thread + half];
      second[thread] += second[thread + half];
    }
    __syncthreads();
  }
  return {first[0], second[0]};
}

// sum = x + added, which is rounded, and
// (sum - mean) / sqrt(variance + eps) * weight + bias; without kMean the mean is
// 0 and there is no bias.
//
//   x, added    [rows, width]; null `added`: the sum is x, and `sum` is null
//   statistics  [1 or 2, rows]: 1 / sqrt(variance + eps), then the mean
//   K           elements of an access; it divides width and the addresses
template <class T, int K, bool kMean>
__device__ void norm(
    const T* x, const T* added, const T* weight, const T* bias, T* sum, T* out,
    float* statistics, long long rows, long long width, float eps) {
  const long long row = blockIdx.x;
  const long long begin = row * width;
  const int thread = threadIdx.x;
  const float share = 1 / static_cast<float>(width);
  float values[kNormValues<K>];
  float total = 0;
  ECHELON_UNROLL
  for (int p = 0; p < kNormValues<K> / K; ++p) {
    const int at = (p * blockDim.x + thread) * K;
    if (at >= width) continue;
    auto all = *reinterpret_cast<const Packet<T, K>*>(x + begin + at);
    if (added != nullptr) {
      const auto more =
          *reinterpret_cast<const Packet<T, K>*>(added + begin + at);
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) {
        store(all.values[k], to_float(all.values[k]) + to_float(more.values[k]));
      }
      *reinterpret_cast<Packet<T, K>*>(sum + begin + at) = all;
    }
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) {
      const float value = to_float(all.values[k]);
      values[p * K + k] = value;
      total += kMean ? value : value * value;
    }
  }
  float mean = 0;
  float variance = sums_of_block({total, 0}).a * share;
  if (kMean) {
    mean = variance;
    total = 0;
    ECHELON_UNROLL
    for (int p = 0; p < kNormValues<K> / K; ++p) {
      const int at = (p * blockDim.x + thread) * K;
      if (at >= width) continue;
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) {
        const float centred = values[p * K + k] - mean;
        total += centred * centred;
      }
    }
    variance = sums_of_block({total, 0}).a * share;
  }
  const float scale = 1 / sqrtf(variance + eps);
  ECHELON_UNROLL
  for (int p = 0; p < kNormValues<K> / K; ++p) {
    const int at = (p * blockDim.x + thread) * K;
    if (at >= width) continue;
    const auto w = *reinterpret_cast<const Packet<T, K>*>(weight + at);
    Packet<T, K> b;
    if (kMean) b = *reinterpret_cast<const Packet<T, K>*>(bias + at);
    Packet<T, K> result;
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) {
      const float normal =
          (values[p * K + k] - mean) * scale * to_float(w.values[k]);
      store(result.values[k], kMean ? normal + to_float(b.values[k]) : normal);
    }
    *reinterpret_cast<Packet<T, K>*>(out + begin + at) = result;
  }
  if (thread == 0) {
    statistics[row] = scale;
    if (kMean) statistics[rows + row] = mean;
  }
}

// The gradient to the sum: that of the norm, and `passed`, which came to the
// sum on another way. Block i has the rows i, i + blocks, …
//
//   gradient, passed  [rows, width]; null `passed`: none
//   x                 [rows, width], what was normalised
//   partial           [1 or 2, blocks, width]: each block's sums for the
//                     gradients of weight and bias; null: not wanted
template <class T, int K, bool kMean>
__device__ void norm_gradient(
    const T* gradient, const T* passed, const T* x, const T* weight,
    const float* statistics, T* out, float* partial, long long rows,
    long long width, long long blocks) {
  const int thread = threadIdx.x;
  const float share = 1 / static_cast<float>(width);
  float for_weight[kNormValues<K>] = {};
  float for_bias[kMean ? kNormValues<K> : 1] = {};
  for (long long row = blockIdx.x; row < rows; row += blocks) {
    const long long begin = row * width;
    const float scale = statistics[row];
    const float mean = kMean ? statistics[rows + row] : 0;
    Two sums = {0, 0};
    ECHELON_UNROLL
    for (int p = 0; p < kNormValues<K> / K; ++p) {
      const int at = (p * blockDim.x + thread) * K;
      if (at >= width) continue;
      const auto g =
          *reinterpret_cast<const Packet<T, K>*>(gradient + begin + at);
      const auto v = *reinterpret_cast<const Packet<T, K>*>(x + begin + at);
      const auto w = *reinterpret_cast<const Packet<T, K>*>(weight + at);
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) {
        const float slope = to_float(g.values[k]);
        const float product = slope * ((to_float(v.values[k]) - mean) * scale);
        for_weight[p * K + k] += product;
        if (kMean) for_bias[p * K + k] += slope;
        sums.a += product * to_float(w.values[k]);
        if (kMean) sums.b += slope * to_float(w.values[k]);
      }
    }
    sums = sums_of_block(sums);
    const float along = sums.a * share;
    const float level = sums.b * share;
    ECHELON_UNROLL
    for (int p = 0; p < kNormValues<K> / K; ++p) {
      const int at = (p * blockDim.x + thread) * K;
      if (at >= width) continue;
      const auto g =
          *reinterpret_cast<const Packet<T, K>*>(gradient + begin + at);
      const auto v = *reinterpret_cast<const Packet<T, K>*>(x + begin + at);
      const auto w = *reinterpret_cast<const Packet<T, K>*>(weight + at);
      Packet<T, K> more;
      if (passed != nullptr) {
        more = *reinterpret_cast<const Packet<T, K>*>(passed + begin + at);
      }
      Packet<T, K> result;
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) {
        const float normal = (to_float(v.values[k]) - mean) * scale;
        const float slope = to_float(g.values[k]) * to_float(w.values[k]);
        const float own = (slope - level - normal * along) * scale;
        store(
            result.values[k],
            passed != nullptr ? own + to_float(more.values[k]) : own);
      }
      *reinterpret_cast<Packet<T, K>*>(out + begin + at) = result;
    }
  }
  if (partial == nullptr) return;
  partial += blockIdx.x * width;
  ECHELON_UNROLL
  for (int p = 0; p < kNormValues<K> / K; ++p) {
    const int at = (p * blockDim.x + thread) * K;
    if (at >= width) continue;
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) {
      partial[at + k] = for_weight[p * K + k];
      if (kMean) partial[blocks * width + at + k] = for_bias[p * K + k];
    }
  }
}

constexpr int kSumColumns = 32;  // of a block

// out [count, width]: the sums over the blocks of partial [count, blocks,
// width]. A block of threads has kSumColumns columns of one of the `count`, and
// as many rows at a time as it has threads for.
template <class T>
__device__ void norm_parameters(
    const float* partial, T* out, long long blocks, long long width) {
  __shared__ float all[kNormThreads];
  const int thread = threadIdx.x;
  const long long tiles = (width + kSumColumns - 1) / kSumColumns;
  const long long which = blockIdx.x / tiles;
  const long long column =
      blockIdx.x % tiles * kSumColumns + thread % kSumColumns;
  const int groups = blockDim.x / kSumColumns;
  float sum = 0;
  if (column < width) {
    const float* from = partial + which * blocks * width + column;
    for (long long row = thread / kSumColumns; row < blocks; row += groups) {
      sum += from[row * width];
    }
  }
  all[thread] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half >= kSumColumns; half /= 2) {
    if (thread < half) all[thread] += all[thread + half];
    __syncthreads();
  }
  if (thread < kSumColumns && column < width) {
    store(out[which * width + column], all[thread]);
  }
}

#define ECHELON_NORM_OF(kind, name, T, K, kMean)                              \
  extern "C" __global__ void __launch_bounds__(kNormThreads)                  \
      kind##_norm_##name(                                                     \
          const T* x, const T* added, const T* weight, const T* bias, T* sum, \
          T* out, float* statistics, long long rows, long long width,         \
          float eps) {                                                        \
    norm<T, K, kMean>(                                                        \
        x, added, weight, bias, sum, out, statistics, rows, width, eps);      \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(kNormThreads)                  \
      kind##_norm_gradient_##name(                                            \
          const T* gradient, const T* passed, const T* x, const T* weight,    \
          const float* statistics, T* out, float* partial, long long rows,    \
          long long width, long long blocks) {                                \
    norm_gradient<T, K, kMean>(                                               \
        gradient, passed, x, weight, statistics, out, partial, rows, width,   \
        blocks);                                                              \
  }
#define ECHELON_NORM(name, T)                                          \
  ECHELON_NORM_OF(rms, name, T, 1, false)                              \
  ECHELON_NORM_OF(rms, name##_packets, T, 16 / sizeof(T), false)       \
  ECHELON_NORM_OF(layer, name, T, 1, true)                             \
  ECHELON_NORM_OF(layer, name##_packets, T, 16 / sizeof(T), true)      \
  extern "C" __global__ void norm_parameters_##name(                   \
      const float* partial, T* out, long long blocks, long long width) { \
    norm_parameters(partial, out, blocks, width);                      \
  }
ECHELON_NORM(float, float)
ECHELON_NORM(bfloat16, BFloat16)
ECHELON_NORM(half, Half)
