// The loss over a vocabulary, a block of threads for each row of logits: what
// forward needs of a row in one read, and its gradient in one read and one
// write. LibTorch's operators need five and more passes. Compiled after
// numbers.cu.

constexpr int kThreads = 512;  // of a block: kVocabLossThreads

__device__ inline float infinity() {
  return __builtin_bit_cast(float, 0x7f800000u);
}

template <class T>
__device__ inline long long elements_before_packets(const T* row) {
  const auto past = reinterpret_cast<unsigned long long>(row) % 16;
  return past == 0 ? 0 : static_cast<long long>((16 - past) / sizeof(T));
}

// The largest of some logits, and the sum of exp(logit - largest).
struct Sum {
  float most;
  float sum;

  template <int N>
  __device__ void add(const float (&logits)[N]) {
    float largest = logits[0];
    for (int i = 1; i < N; ++i) largest = fmaxf(largest, logits[i]);
    if (largest > most) {
      sum *= expf(most - largest);
      most = largest;
    }
    for (int i = 0; i < N; ++i) {
      // A logit of -infinity adds nothing, also where none is larger.
      if (logits[i] != -infinity()) sum += expf(logits[i] - most);
    }
  }

  __device__ void add(const Sum& other) {
    if (other.most > most) {
      sum *= expf(most - other.most);
      most = other.most;
    }
    if (other.most != -infinity()) {
      sum += other.sum * expf(other.most - most);
    } else {
      sum += other.sum;  // 0, or NaN
    }
  }
};

// For each row: the largest logit, the sum of exp(logit - largest), and the
// target's logit, or 0 where the target is not in [0, width).
//
//   rows  [n, width], one row every `stride` elements
//   ids   [n], the target of each row
//   sums  [3, n]
template <class T>
__device__ void vocab_sums(
    const T* rows, const long long* ids, float* sums, long long n,
    long long width, long long stride) {
  __shared__ float most[kThreads];
  __shared__ float sum[kThreads];
  const long long index = blockIdx.x;
  const T* row = rows + index * stride;
  const int thread = threadIdx.x;

  long long head = elements_before_packets(row);
  if (head > width) head = width;
  const long long packets = (width - head) / Packet<T>::kSize;
  const long long tail = head + packets * Packet<T>::kSize;
  Sum mine = {-infinity(), 0};
  const auto add_one = [&](long long i) {
    const float one[1] = {to_float(row[i])};
    mine.add(one);
  };
  for (long long i = thread; i < head; i += blockDim.x) add_one(i);
  const auto* first = reinterpret_cast<const Packet<T>*>(row + head);
  for (long long i = thread; i < packets; i += blockDim.x) {
    const Packet<T> packet = first[i];
    float logits[Packet<T>::kSize];
    for (int k = 0; k < Packet<T>::kSize; ++k) {
      logits[k] = to_float(packet.values[k]);
    }
    mine.add(logits);
  }
  for (long long i = tail + thread; i < width; i += blockDim.x) add_one(i);

  most[thread] = mine.most;
  sum[thread] = mine.sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (thread < half) {
      mine.add(Sum{most[thread + half], sum[thread + half]});
      most[thread] = mine.most;
      sum[thread] = mine.sum;
    }
    __syncthreads();
  }
  if (thread == 0) {
    const long long id = ids[index];
    sums[index] = mine.most;
    sums[n + index] = mine.sum;
    sums[2 * n + index] = id >= 0 && id < width ? to_float(row[id]) : 0;
  }
}

// (exp(logit - total) - one at the target) times the row's scale.
//
//   total, scale  [n]
//   out           as rows, with a row every `out_stride` elements
template <class T>
__device__ void vocab_gradient(
    const T* rows, const long long* ids, const float* total,
    const float* scale, T* out, long long width, long long stride,
    long long out_stride) {
  const long long index = blockIdx.x;
  const T* row = rows + index * stride;
  T* to = out + index * out_stride;
  const int thread = threadIdx.x;
  const long long id = ids[index];
  const float shift = total[index];
  const float factor = scale[index];

  const auto gradient = [&](T logit, long long i) {
    const float share = expf(to_float(logit) - shift);
    return (i == id ? share - 1 : share) * factor;
  };
  const auto write_one = [&](long long i) {
    store(to[i], gradient(row[i], i));
  };
  long long head = elements_before_packets(row);
  // Rows that are aligned differently are copied one by one.
  if (head > width || head != elements_before_packets(to)) head = width;
  const long long packets = (width - head) / Packet<T>::kSize;
  const long long tail = head + packets * Packet<T>::kSize;
  for (long long i = thread; i < head; i += blockDim.x) write_one(i);
  const auto* first = reinterpret_cast<const Packet<T>*>(row + head);
  auto* first_out = reinterpret_cast<Packet<T>*>(to + head);
  for (long long i = thread; i < packets; i += blockDim.x) {
    const Packet<T> packet = first[i];
    const long long begin = head + i * Packet<T>::kSize;
    Packet<T> result;
    for (int k = 0; k < Packet<T>::kSize; ++k) {
      store(result.values[k], gradient(packet.values[k], begin + k));
    }
    first_out[i] = result;
  }
  for (long long i = tail + thread; i < width; i += blockDim.x) write_one(i);
}

#define ECHELON_VOCAB_LOSS(name, T)                                           \
  extern "C" __global__ void vocab_sums_##name(                               \
      const T* rows, const long long* ids, float* sums, long long n,          \
      long long width, long long stride) {                                    \
    vocab_sums(rows, ids, sums, n, width, stride);                            \
  }                                                                           \
  extern "C" __global__ void vocab_gradient_##name(                           \
      const T* rows, const long long* ids, const float* total,                \
      const float* scale, T* out, long long width, long long stride,          \
      long long out_stride) {                                                 \
    vocab_gradient(rows, ids, total, scale, out, width, stride, out_stride);  \
  }
ECHELON_VOCAB_LOSS(float, float)
ECHELON_VOCAB_LOSS(bfloat16, BFloat16)
ECHELON_VOCAB_LOSS(half, Half)
