// The gradient of a table of embeddings: each row is the sum of the gradients of
// the tokens that have its id. Tokens come sorted by id, so those of a row are
// adjacent, in their order. A block sums one row, and writes zeros where no
// token has it. A row of many tokens would keep its block busy long after the
// others have ended. So the sorted tokens are cut into chunks at fixed places,
// and a kernel before sums each chunk whose tokens are all of one id; the row's
// block then takes the chunk's sum in place of its tokens. The order of the sums
// depends on nothing but the ids. Compiled after numbers.cu.

constexpr int kTokenChunk = 64;       // tokens: kTokenChunk of embedding.h
constexpr int kEmbeddingThreads = 256;  // of a block, at most
constexpr int kTokensAtOnce = 4;      // whose rows a thread waits for together

template <int K>
struct TokenSums {
  float of[K];
};

// Adds the rows of the sorted tokens from `begin` to `end` at K columns.
template <class T, int K>
__device__ inline void add_tokens(
    TokenSums<K>& sums, const T* gradient, const long long* order,
    long long begin, long long end, long long width) {
  for (long long i = begin; i < end; i += kTokensAtOnce) {
    Packet<T, K> rows[kTokensAtOnce];
    ECHELON_UNROLL
    for (int j = 0; j < kTokensAtOnce; ++j) {
      // Those after the end are read again and not added.
      const long long token = order[i + j < end ? i + j : end - 1];
      rows[j] = *reinterpret_cast<const Packet<T, K>*>(gradient + token * width);
    }
    ECHELON_UNROLL
    for (int j = 0; j < kTokensAtOnce; ++j) {
      if (i + j >= end) continue;
      ECHELON_UNROLL
      for (int k = 0; k < K; ++k) sums.of[k] += to_float(rows[j].values[k]);
    }
  }
}

// The sums of the chunks whose tokens are all of one id.
//
//   gradient  [tokens, width]
//   ids       [tokens], sorted
//   order     [tokens], the token that each of them is
//   partial   [tokens / kTokenChunk, width]
//   K         elements of an access; it divides width and the addresses
template <class T, int K>
__device__ void sum_chunks(
    const T* gradient, const long long* ids, const long long* order,
    float* partial, long long width) {
  const long long chunk = blockIdx.x;
  const long long begin = chunk * kTokenChunk;
  if (ids[begin] != ids[begin + kTokenChunk - 1]) return;
  for (long long column = static_cast<long long>(threadIdx.x) * K; column < width;
       column += static_cast<long long>(blockDim.x) * K) {
    TokenSums<K> sums = {};
    add_tokens<T, K>(
        sums, gradient + column, order, begin, begin + kTokenChunk, width);
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) partial[chunk * width + column + k] = sums.of[k];
  }
}

// A row of the table's gradient.
//
//   first    [rows + 1], where the sorted tokens of each row begin
//   padding  a row that stays 0; -1: none
//   out      [rows, width]
template <class T, int K>
__device__ void sum_rows(
    const T* gradient, const long long* order, const long long* first,
    const float* partial, T* out, long long width, long long padding) {
  const long long row = blockIdx.x;
  const long long begin = first[row];
  const long long end = row == padding ? begin : first[row + 1];
  // The chunks that are this row's alone.
  long long from = (begin + kTokenChunk - 1) / kTokenChunk;
  long long to = end / kTokenChunk;
  const bool none = from >= to;
  for (long long column = static_cast<long long>(threadIdx.x) * K; column < width;
       column += static_cast<long long>(blockDim.x) * K) {
    const T* at = gradient + column;
    TokenSums<K> sums = {};
    add_tokens<T, K>(sums, at, order, begin, none ? end : from * kTokenChunk, width);
    if (!none) {
      for (long long chunk = from; chunk < to; ++chunk) {
        ECHELON_UNROLL
        for (int k = 0; k < K; ++k) {
          sums.of[k] += partial[chunk * width + column + k];
        }
      }
      add_tokens<T, K>(sums, at, order, to * kTokenChunk, end, width);
    }
    Packet<T, K> result;
    ECHELON_UNROLL
    for (int k = 0; k < K; ++k) store(result.values[k], sums.of[k]);
    *reinterpret_cast<Packet<T, K>*>(out + row * width + column) = result;
  }
}

#define ECHELON_EMBEDDING_OF(name, T, K)                                        \
  extern "C" __global__ void __launch_bounds__(kEmbeddingThreads)               \
      sum_chunks_##name(                                                        \
          const T* gradient, const long long* ids, const long long* order,      \
          float* partial, long long width) {                                    \
    sum_chunks<T, K>(gradient, ids, order, partial, width);                     \
  }                                                                             \
  extern "C" __global__ void __launch_bounds__(kEmbeddingThreads)               \
      sum_rows_##name(                                                          \
          const T* gradient, const long long* order, const long long* first,    \
          const float* partial, T* out, long long width, long long padding) {   \
    sum_rows<T, K>(gradient, order, first, partial, out, width, padding);       \
  }
#define ECHELON_EMBEDDING(name, T)  \
  ECHELON_EMBEDDING_OF(name, T, 1)  \
  ECHELON_EMBEDDING_OF(name##_packets, T, 16 / sizeof(T))
ECHELON_EMBEDDING(float, float)
ECHELON_EMBEDDING(bfloat16, BFloat16)
ECHELON_EMBEDDING(half, Half)
