// Norms over the features of a token, with the residual sum before them: a
// block of threads has a row, which its threads keep in registers, so that
// forward reads and writes each tensor once. Backward is one pass too: blocks
// have several rows each and keep their sums for the gradients of weight and
// bias. Blocks that come after each other are a group. The last block of a
// group to end adds up the group's sums, and the last of these blocks adds up
// the groups. Which block that is differs from run to run; the order of the
// sums does not. Compiled after numbers.cu.

constexpr int kNormThreads = 512;  // of a block, at most: kNormThreads of norm.h

// Elements of a row for each thread: kNormValues of norm.h. Single accesses have
// an address each, which need registers too.
template <int K>
constexpr int kNormValues = K == 1 ? 8 : 16;

// Blocks of a group, and zeros behind the statistics of the rows, with which
// backward counts blocks: kNormGroup and kNormCounters of norm.h. The first
// counter is of the groups, the others are of the blocks of each group.
constexpr int kNormGroup = 24;
constexpr int kNormCounters = 48;

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
//   statistics  [1 or 2, rows + kNormCounters]: 1 / sqrt(variance + eps), then
//               the mean; behind the first of them the counters, which are 0
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
    if (kMean) statistics[rows + kNormCounters + row] = mean;
  }
  if (row > 0) return;
  for (int i = thread; i < kNormCounters; i += blockDim.x) {
    statistics[rows + i] = 0;
  }
}

// to [width]: the sums of from [parts, width] over the parts, one after the
// other; `stride` elements from part to part. `to` may be the first part.
template <int K, class To>
__device__ inline void add_parts(
    const float* from, To* to, int parts, int stride, int width) {
  for (int at = threadIdx.x * K; at < width; at += blockDim.x * K) {
    auto sum = *reinterpret_cast<const Packet<float, K>*>(from + at);
    for (int part = 1; part < parts; ++part) {
      const auto more =
          *reinterpret_cast<const Packet<float, K>*>(from + part * stride + at);
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) sum.values[k] += more.values[k];
    }
    Packet<To, K> result;
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) store(result.values[k], sum.values[k]);
    *reinterpret_cast<Packet<To, K>*>(to + at) = result;
  }
}

// out [count, width]: the sums of partial [count, blocks, width], to which the
// calling block has written its own. partial has less than 2^31 elements.
template <int K, class T>
__device__ inline void add_blocks(
    float* partial, T* out, unsigned* counters, int count, int blocks,
    int width) {
  const int group = static_cast<int>(blockIdx.x) / kNormGroup;
  const int groups = (blocks + kNormGroup - 1) / kNormGroup;
  const int left = blocks - group * kNormGroup;
  const int size = left < kNormGroup ? left : kNormGroup;
  if (!is_last_block(counters + 1 + group, size)) return;
  for (int i = 0; i < count; ++i) {
    float* first = partial + (i * blocks + group * kNormGroup) * width;
    add_parts<K>(first, first, size, width, width);
  }
  if (!is_last_block(counters, groups)) return;
  for (int i = 0; i < count; ++i) {
    add_parts<K>(
        partial + i * blocks * width, out + i * width, groups,
        kNormGroup * width, width);
  }
}

// The gradient to the sum: that of the norm, and `passed`, which came to the
// sum on another way. Block i has the rows i, i + blocks, …
//
//   gradient, passed  [rows, width]; null `passed`: none
//   x                 [rows, width], what was normalised
//   statistics        norm()'s
//   partial           [1 or 2, blocks, width]: room for each block's sums; null:
//                     no gradients of weight and bias are wanted
//   parameters        [1 or 2, width]: the gradients of weight and bias
template <class T, int K, bool kMean>
__device__ void norm_gradient(
    const T* gradient, const T* passed, const T* x, const T* weight,
    float* statistics, T* out, float* partial, T* parameters, long long rows,
    long long width, long long blocks) {
  const int thread = threadIdx.x;
  const float share = 1 / static_cast<float>(width);
  float for_weight[kNormValues<K>] = {};
  float for_bias[kMean ? kNormValues<K> : 1] = {};
  for (long long row = blockIdx.x; row < rows; row += blocks) {
    const long long begin = row * width;
    const float scale = statistics[row];
    const float mean = kMean ? statistics[rows + kNormCounters + row] : 0;
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
  float* own = partial + blockIdx.x * width;
  ECHELON_UNROLL
  for (int p = 0; p < kNormValues<K> / K; ++p) {
    const int at = (p * blockDim.x + thread) * K;
    if (at >= width) continue;
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) {
      own[at + k] = for_weight[p * K + k];
      if (kMean) own[blocks * width + at + k] = for_bias[p * K + k];
    }
  }
  add_blocks<K == 1 ? 1 : 4>(
      partial, parameters, reinterpret_cast<unsigned*>(statistics + rows),
      kMean ? 2 : 1, static_cast<int>(blocks), static_cast<int>(width));
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
          float* statistics, T* out, float* partial, T* parameters,           \
          long long rows, long long width, long long blocks) {                \
    norm_gradient<T, K, kMean>(                                               \
        gradient, passed, x, weight, statistics, out, partial, parameters,    \
        rows, width, blocks);                                                 \
  }
#define ECHELON_NORM(name, T)                                    \
  ECHELON_NORM_OF(rms, name, T, 1, false)                        \
  ECHELON_NORM_OF(rms, name##_packets, T, 16 / sizeof(T), false) \
  ECHELON_NORM_OF(layer, name, T, 1, true)                       \
  ECHELON_NORM_OF(layer, name##_packets, T, 16 / sizeof(T), true)
ECHELON_NORM(float, float)
ECHELON_NORM(bfloat16, BFloat16)
ECHELON_NORM(half, Half)
