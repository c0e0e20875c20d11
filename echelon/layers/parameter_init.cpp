// Everything here works on blocks of 16 counters in plain loops without
// branches, which the compiler turns into vector instructions: once for any
// x86-64, once for AVX2, chosen when the program runs. Logarithm, sine and
// cosine are our own for that reason, and so that the bits depend neither on
// the version of a mathematics library nor on the processor. They use only
// operations that IEEE 754 rounds exactly, and none fused (see CMakeLists.txt).
//
// The file is compiled with options of its own, without the precompiled header,
// so it includes only the few headers of ATen that it needs.
#include "echelon/layers/parameter_init.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "echelon/error.h"
#include "echelon/layers/philox.h"
#include "echelon/text/check.h"

#define ECHELON_INLINE [[gnu::always_inline]] inline

namespace echelon {
namespace {

constexpr int kCounters = kPhiloxCounters;
constexpr int kBlock = kPhiloxBlock;  // elements of a block

using Words = PhiloxWords::Words;
using Reals = std::array<double, kCounters>;
using Block = std::array<double, kBlock>;

// (word + 1/2) / 2^32, exactly: in (0, 1), symmetric around 1/2. The word goes
// into the mantissa of 2^52, which vector units can do where they cannot
// convert unsigned numbers.
ECHELON_INLINE double unit(uint32_t word) {
  const double shifted =
      std::bit_cast<double>(uint64_t{0x4330000000000000} | word);
  return (shifted - 4503599627370495.5) * 0x1p-32;
}

// Natural logarithm of a normal number: 2 artanh((m - 1) / (m + 1)) of the
// mantissa m in [sqrt(1/2), sqrt(2)), plus the exponent. Error below 1e-14.
ECHELON_INLINE double logarithm(double x) {
  constexpr uint64_t kRoot = 0x3FE6A09E667F3BCD;  // sqrt(1/2)
  constexpr uint64_t kMantissa = 0x000FFFFFFFFFFFFF;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const uint64_t moved = bits + (0x3FF0000000000000 - kRoot);
  const double exponent =
      std::bit_cast<double>(uint64_t{0x4330000000000000} | (moved >> 52)) -
      (0x1p52 + 1023.0);
  const double m = std::bit_cast<double>((moved & kMantissa) + kRoot);
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double sum = 1.0 / 19;
  sum = sum * z + 1.0 / 17;
  sum = sum * z + 1.0 / 15;
  sum = sum * z + 1.0 / 13;
  sum = sum * z + 1.0 / 11;
  sum = sum * z + 1.0 / 9;
  sum = sum * z + 1.0 / 7;
  sum = sum * z + 1.0 / 5;
  sum = sum * z + 1.0 / 3;
  sum = sum * z + 1.0;
  return exponent * 0.693147180559945309417 + 2.0 * s * sum;
}

// cos and sin of 2 pi u, u in (0, 1): the Taylor series within an eighth of a
// turn, then the quadrant. Error below 1e-14.
ECHELON_INLINE void circle(double u, double& cosine, double& sine) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to a whole number
  const double turned = 4.0 * u + kRound;
  const uint64_t quadrant = std::bit_cast<uint64_t>(turned);
  const double x = (4.0 * u - (turned - kRound)) * 1.57079632679489661923;
  const double z = x * x;
  double s = 1.0 - z * (1.0 / (16 * 17));
  s = 1.0 - s * z * (1.0 / (14 * 15));
  s = 1.0 - s * z * (1.0 / (12 * 13));
  s = 1.0 - s * z * (1.0 / (10 * 11));
  s = 1.0 - s * z * (1.0 / (8 * 9));
  s = 1.0 - s * z * (1.0 / (6 * 7));
  s = 1.0 - s * z * (1.0 / (4 * 5));
  s = 1.0 - s * z * (1.0 / (2 * 3));
  double c = 1.0 - z * (1.0 / (15 * 16));
  c = 1.0 - c * z * (1.0 / (13 * 14));
  c = 1.0 - c * z * (1.0 / (11 * 12));
  c = 1.0 - c * z * (1.0 / (9 * 10));
  c = 1.0 - c * z * (1.0 / (7 * 8));
  c = 1.0 - c * z * (1.0 / (5 * 6));
  c = 1.0 - c * z * (1.0 / (3 * 4));
  c = 1.0 - c * z * (1.0 / 2);
  const uint64_t s_bits = std::bit_cast<uint64_t>(s * x);
  const uint64_t c_bits = std::bit_cast<uint64_t>(c);
  const uint64_t swap = uint64_t{0} - (quadrant & 1);
  const uint64_t negate_s = (quadrant & 2) << 62;
  const uint64_t negate_c = ((quadrant + 1) & 2) << 62;
  cosine =
      std::bit_cast<double>(((c_bits & ~swap) | (s_bits & swap)) ^ negate_c);
  sine = std::bit_cast<double>(((s_bits & ~swap) | (c_bits & swap)) ^ negate_s);
}

// Two independent normal numbers from two words.
ECHELON_INLINE void
box_muller(const Words& first, const Words& second, Reals& even, Reals& odd) {
  for (int i = 0; i < kCounters; ++i) {
    const double radius = std::sqrt(-2.0 * logarithm(unit(first[i])));
    double cosine;
    double sine;
    circle(unit(second[i]), cosine, sine);
    even[i] = radius * cosine;
    odd[i] = radius * sine;
  }
}

ECHELON_INLINE void interleave(
    const Reals& a, const Reals& b, const Reals& c, const Reals& d,
    Block& out) {
  for (int i = 0; i < kCounters; ++i) {
    out[4 * i] = a[i];
    out[4 * i + 1] = b[i];
    out[4 * i + 2] = c[i];
    out[4 * i + 3] = d[i];
  }
}

ECHELON_INLINE void uniform_block(const PhiloxWords& words, Block& out) {
  Reals a, b, c, d;
  for (int i = 0; i < kCounters; ++i) {
    a[i] = 2.0 * unit(words.a[i]) - 1.0;
    b[i] = 2.0 * unit(words.b[i]) - 1.0;
    c[i] = 2.0 * unit(words.c[i]) - 1.0;
    d[i] = 2.0 * unit(words.d[i]) - 1.0;
  }
  interleave(a, b, c, d, out);
}

ECHELON_INLINE void normal_block(const PhiloxWords& words, Block& out) {
  Reals a, b, c, d;
  box_muller(words.a, words.b, a, b);
  box_muller(words.c, words.d, c, d);
  interleave(a, b, c, d, out);
}

// Block number `index` of a stream.
ECHELON_INLINE void
make_block(bool normal, uint64_t key, uint64_t index, Block& out) {
  PhiloxWords words;
  philox(key, 0, index * kCounters, words);
  if (normal) {
    normal_block(words, out);
  } else {
    uniform_block(words, out);
  }
}

using BlockMaker = void (*)(uint64_t key, uint64_t index, Block& out);

template <bool normal>
void make_any(uint64_t key, uint64_t index, Block& out) {
  make_block(normal, key, index, out);
}

#if defined(__x86_64__)
template <bool normal>
[[gnu::target("avx2")]] void
make_avx2(uint64_t key, uint64_t index, Block& out) {
  make_block(normal, key, index, out);
}

template <bool normal>
BlockMaker block_maker() {
  return __builtin_cpu_supports("avx2") ? make_avx2<normal> : make_any<normal>;
}
#else
template <bool normal>
BlockMaker block_maker() {
  return make_any<normal>;
}
#endif

template <typename T>
void fill_range(
    T* out, uint64_t key, int64_t begin, int64_t end, double scale,
    BlockMaker make) {
  Block block;
  for (int64_t at = begin; at < end;) {
    const int64_t index = at / kBlock;
    const int64_t base = index * kBlock;
    const int64_t stop = std::min(end, base + kBlock);
    make(key, static_cast<uint64_t>(index), block);
    for (; at < stop; ++at) {
      out[at - begin] =
          static_cast<T>(scale * block[static_cast<size_t>(at - base)]);
    }
  }
}

// Says which elements of a parameter go where, in `rows` rows; in a row, every
// run is contiguous both in the parameter and in the memory that is filled.
// Offsets are in elements.
struct Region {
  struct Run {
    int64_t global = 0;  // in a row of the parameter
    int64_t local = 0;   // in a row of the memory
    int64_t size = 0;
  };
  int64_t rows = 1;
  int64_t global_stride = 0;  // from one row of the parameter to the next
  int64_t local_stride = 0;
  std::vector<Run> runs;
};

constexpr int64_t kGrain = 1 << 16;  // elements that are worth a thread

template <typename T>
void fill_region(
    T* data, const Region& region, uint64_t key, double scale,
    BlockMaker make) {
  const auto fill_part = [&](int64_t row, const Region::Run& run, int64_t lo,
                             int64_t hi) {
    const int64_t from = row * region.global_stride + run.global;
    fill_range(
        data + row * region.local_stride + run.local + lo, key, from + lo,
        from + hi, scale, make);
  };
  if (region.rows == 1) {
    for (const auto& run : region.runs) {
      at::parallel_for(0, run.size, kGrain, [&](int64_t lo, int64_t hi) {
        fill_part(0, run, lo, hi);
      });
    }
    return;
  }
  const int64_t grain =
      std::max<int64_t>(1, kGrain / std::max<int64_t>(1, region.local_stride));
  at::parallel_for(0, region.rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (const auto& run : region.runs) fill_part(row, run, 0, run.size);
    }
  });
}

void fill(
    const at::Tensor& slice, const Region& region, uint64_t key, double scale,
    BlockMaker make) {
  if (!slice.is_contiguous() || !slice.is_floating_point()) {
    throw Error(
        "initial values go into contiguous floating-point memory; make the "
        "tensor contiguous and copy");
  }
  const at::NoGradGuard no_grad;
  if (!slice.is_cpu()) {
    const auto host =
        at::empty(slice.sizes(), slice.options().device(at::kCPU));
    fill(host, region, key, scale, make);
    slice.copy_(host);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, slice.scalar_type(), "fill", [&] {
        fill_region(slice.data_ptr<scalar_t>(), region, key, scale, make);
      });
}

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  int64_t result = 1;
  for (size_t i = begin; i < end; ++i) result *= sizes[i];
  return result;
}

Region region_of(const Shard& shard) {
  if (shard.shape.empty()) return {.runs = {{0, 0, 1}}};
  const auto dim = static_cast<size_t>(shard.dim);
  const int64_t inner = product(shard.shape, dim + 1, shard.shape.size());
  Region region{
      .rows = product(shard.shape, 0, dim),
      .global_stride = inner * shard.shape[dim],
      .local_stride = inner * shard.local_shape()[dim]};
  int64_t local = 0;
  for (const auto& piece : shard.pieces) {
    const int64_t size = inner * piece.size();
    region.runs.push_back({inner * piece.begin, local, size});
    local += size;
  }
  return region;
}

void fill_by(
    const InitialValue& initial, const at::Tensor& tensor, const Region& region,
    uint64_t key) {
  switch (initial.kind) {
    case InitialValue::Kind::constant: {
      const at::NoGradGuard no_grad;
      tensor.fill_(initial.value);
      return;
    }
    case InitialValue::Kind::uniform:
      return fill(tensor, region, key, initial.value, block_maker<false>());
    case InitialValue::Kind::normal:
      return fill(tensor, region, key, initial.value, block_maker<true>());
  }
}

}  // namespace

uint64_t parameter_key(uint64_t seed, std::string_view name) {
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

void fill_initial(
    const at::Tensor& slice, uint64_t seed, std::string_view name,
    int64_t first_element, const InitialValue& initial) {
  const Region one{.runs = {{first_element, 0, slice.numel()}}};
  fill_by(initial, slice, one, parameter_key(seed, name));
}

void fill_initial(
    const at::Tensor& part, uint64_t seed, std::string_view name,
    const Shard& shard, const InitialValue& initial) {
  ECHELON_CHECK(
      part.sizes() == at::IntArrayRef(shard.local_shape()),
      "\"{}\": its tensor and its shard differ", name);
  fill_by(initial, part, region_of(shard), parameter_key(seed, name));
}

}  // namespace echelon
