// The resizing of image.h. Pillow's BILINEAR is a triangle as wide as the
// shrink, first along rows, then along columns, each rounded to 8 bits; weights
// have 22 fractional bits. The products of two 11-bit halves of a weight with
// 8-bit pixels fit the 16-bit multiply-and-add of AVX2, which sums two
// neighbours at once; high * 2^11 + low then is the exact sum. The functions
// without AVX2 add up the same whole numbers.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "echelon/data/images/image.h"
#include "echelon/data/sources/random.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace echelon {
namespace {

constexpr int kWeightBits = 22;
constexpr int kHalfBits = 11;
constexpr int32_t kRound = 1 << (kWeightBits - 1);

/// Intermediate rows are padded to whole groups of this many pixels.
constexpr int64_t kGroup = 8;
int64_t padded(int64_t count) {
  return (count + kGroup - 1) / kGroup * kGroup;
}

uint8_t mix(int32_t high, int32_t low) {
  const int32_t sum = (high << kHalfBits) + low + kRound;
  return static_cast<uint8_t>(std::min(sum >> kWeightBits, 255));
}

/// `count` pixels each of two rows that lie row_bytes apart (0: one row).
void mix_row_pair(
    const uint8_t* row, int64_t row_bytes, const int32_t* first,
    const int16_t* high, const int16_t* low, int64_t taps, int64_t count,
    uint8_t* out, int64_t out_bytes) {
  for (int64_t i = 0; i < count; ++i, high += taps, low += taps) {
    for (int64_t r = 0; r < 2; ++r) {
      const uint8_t* from =
          row + r * row_bytes + 4 * static_cast<ptrdiff_t>(first[i]);
      for (int64_t c = 0; c < 4; ++c) {
        int32_t h = 0, l = 0;
        for (int64_t t = 0; t < taps; ++t) {
          h += from[4 * t + c] * high[t];
          l += from[4 * t + c] * low[t];
        }
        out[r * out_bytes + 4 * i + c] = mix(h, l);
      }
    }
  }
}

/// Eight pixels of an output row from `taps` rows, as floats: planes[c][0..7].
void mix_rows(
    const uint8_t* const* rows, const int16_t* high, const int16_t* low,
    int64_t taps, int64_t x, const Normalise& normalise,
    float (*planes)[kGroup]) {
  for (size_t c = 0; c < 3; ++c) {
    for (int64_t i = 0; i < kGroup; ++i) {
      int32_t h = 0, l = 0;
      for (int64_t t = 0; t < taps; ++t) {
        const uint8_t pixel = rows[t][4 * (x + i) + static_cast<int64_t>(c)];
        h += pixel * high[t];
        l += pixel * low[t];
      }
      planes[c][i] = static_cast<float>(mix(h, l)) * normalise.scale[c] +
                     normalise.shift[c];
    }
  }
}

#if defined(__x86_64__)

// The same with AVX2: two rows of pixels at a time, and eight pixels.

#define ECHELON_AVX2 __attribute__((target("avx2")))

struct WideSums {
  __m256i high;
  __m256i low;
};

ECHELON_AVX2 inline void add_wide(
    WideSums& sums, __m256i pairs, __m256i high_weights, __m256i low_weights) {
  sums.high =
      _mm256_add_epi32(sums.high, _mm256_madd_epi16(pairs, high_weights));
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(pairs, low_weights));
}

ECHELON_AVX2 inline __m256i rounded_wide(const WideSums& sums) {
  const __m256i sum =
      _mm256_add_epi32(_mm256_slli_epi32(sums.high, kHalfBits), sums.low);
  return _mm256_srli_epi32(
      _mm256_add_epi32(sum, _mm256_set1_epi32(kRound)), kWeightBits);
}

ECHELON_AVX2 inline __m256i wide_weight_pair(const int16_t* weights) {
  int32_t pair;
  std::memcpy(&pair, weights, sizeof(pair));
  return _mm256_set1_epi32(pair);
}

ECHELON_AVX2 inline __m128i load_two(const uint8_t* pixels) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(pixels));
}

ECHELON_AVX2 void mix_row_pair_wide(
    const uint8_t* row, int64_t row_bytes, const int32_t* first,
    const int16_t* high, const int16_t* low, int64_t taps, int64_t count,
    uint8_t* out, int64_t out_bytes) {
  // Two neighbouring pixels: their reds, greens ... side by side, in 16 bits.
  const __m256i side_by_side = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
  const __m256i zero = _mm256_setzero_si256();
  for (int64_t i = 0; i < count; ++i, high += taps, low += taps) {
    const uint8_t* from = row + 4 * static_cast<ptrdiff_t>(first[i]);
    WideSums sums = {zero, zero};
    for (int64_t t = 0; t < taps; t += 2) {
      const __m256i both = _mm256_inserti128_si256(
          _mm256_castsi128_si256(load_two(from + 4 * t)),
          load_two(from + row_bytes + 4 * t), 1);
      add_wide(
          sums, _mm256_shuffle_epi8(both, side_by_side),
          wide_weight_pair(high + t), wide_weight_pair(low + t));
    }
    const __m256i words = _mm256_packs_epi32(rounded_wide(sums), zero);
    const __m256i bytes = _mm256_packus_epi16(words, zero);
    const int32_t pixel = _mm256_extract_epi32(bytes, 0);
    const int32_t other_pixel = _mm256_extract_epi32(bytes, 4);
    std::memcpy(out + 4 * i, &pixel, sizeof(pixel));
    std::memcpy(out + out_bytes + 4 * i, &other_pixel, sizeof(other_pixel));
  }
}

ECHELON_AVX2 void mix_rows_wide(
    const uint8_t* const* rows, const int16_t* high, const int16_t* low,
    int64_t taps, int64_t x, const Normalise& normalise,
    float (*planes)[kGroup]) {
  const __m256i zero = _mm256_setzero_si256();
  WideSums sums[4] = {{zero, zero}, {zero, zero}, {zero, zero}, {zero, zero}};
  for (int64_t t = 0; t < taps; t += 2) {
    const __m256i a =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[t] + 4 * x));
    const __m256i b = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(rows[t + 1] + 4 * x));
    const __m256i first = _mm256_unpacklo_epi8(a, b);   // pixels 0 1 | 4 5
    const __m256i second = _mm256_unpackhi_epi8(a, b);  // pixels 2 3 | 6 7
    const __m256i wh = wide_weight_pair(high + t);
    const __m256i wl = wide_weight_pair(low + t);
    add_wide(sums[0], _mm256_unpacklo_epi8(first, zero), wh, wl);
    add_wide(sums[1], _mm256_unpackhi_epi8(first, zero), wh, wl);
    add_wide(sums[2], _mm256_unpacklo_epi8(second, zero), wh, wl);
    add_wide(sums[3], _mm256_unpackhi_epi8(second, zero), wh, wl);
  }
  // From four pixels with four channels (in each half) to channels of pixels.
  const __m256 p0 = _mm256_cvtepi32_ps(rounded_wide(sums[0]));
  const __m256 p1 = _mm256_cvtepi32_ps(rounded_wide(sums[1]));
  const __m256 p2 = _mm256_cvtepi32_ps(rounded_wide(sums[2]));
  const __m256 p3 = _mm256_cvtepi32_ps(rounded_wide(sums[3]));
  const __m256 red_green_01 = _mm256_unpacklo_ps(p0, p1);
  const __m256 red_green_23 = _mm256_unpacklo_ps(p2, p3);
  const __m256 blue_01 = _mm256_unpackhi_ps(p0, p1);
  const __m256 blue_23 = _mm256_unpackhi_ps(p2, p3);
  const __m256 channels[3] = {
      _mm256_shuffle_ps(red_green_01, red_green_23, 0x44),
      _mm256_shuffle_ps(red_green_01, red_green_23, 0xee),
      _mm256_shuffle_ps(blue_01, blue_23, 0x44)};
  for (size_t c = 0; c < 3; ++c) {
    _mm256_storeu_ps(
        planes[c],
        _mm256_add_ps(
            _mm256_mul_ps(channels[c], _mm256_set1_ps(normalise.scale[c])),
            _mm256_set1_ps(normalise.shift[c])));
  }
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2");
}

#else

constexpr auto mix_row_pair_wide = mix_row_pair;
constexpr auto mix_rows_wide = mix_rows;

bool has_avx2() {
  return false;
}

#endif

}  // namespace

double ResizePlan::shrink() const {
  return std::min(
      (right - left) / static_cast<double>(width),
      (bottom - top) / static_cast<double>(height));
}

ResizePlan center_plan(ImageDecoder::Size image, int64_t size) {
  const int64_t shorter = std::min(image.width, image.height);
  const auto resized = [&](int64_t side) {
    return side == shorter ? size : size * side / shorter;
  };
  const auto corner = [&](int64_t side) {
    // Halves go to the even number.
    return static_cast<int64_t>(
        std::nearbyint(static_cast<double>(side - size) / 2.0));
  };
  ResizePlan plan;
  plan.right = static_cast<double>(image.width);
  plan.bottom = static_cast<double>(image.height);
  plan.width = resized(image.width);
  plan.height = resized(image.height);
  plan.window_left = corner(plan.width);
  plan.window_top = corner(plan.height);
  return plan;
}

// Follows torchvision's RandomResizedCrop: up to ten boxes of random area and
// ratio, else the largest box in the centre. The draws depend on seed, epoch
// and index alone.
ResizePlan random_plan(
    ImageDecoder::Size image, int64_t size, bool flip, uint64_t seed,
    int64_t epoch, int64_t index) {
  constexpr double kLeastArea = 0.08, kMostArea = 1.0;
  constexpr double kLeastRatio = 3.0 / 4.0, kMostRatio = 4.0 / 3.0;
  constexpr int kTries = 10;
  RandomStream random(
      RandomUse::augment,
      {seed, static_cast<uint64_t>(epoch), static_cast<uint64_t>(index)});
  const auto between = [&](double least, double most) {
    return least + (most - least) * random.uniform();
  };
  const auto full_width = static_cast<double>(image.width);
  const auto full_height = static_cast<double>(image.height);
  double width = 0, height = 0, left = 0, top = 0;
  bool found = false;
  for (int i = 0; i < kTries && !found; ++i) {
    const double area =
        full_width * full_height * between(kLeastArea, kMostArea);
    const double ratio =
        std::exp(between(std::log(kLeastRatio), std::log(kMostRatio)));
    width = std::nearbyint(std::sqrt(area * ratio));
    height = std::nearbyint(std::sqrt(area / ratio));
    found =
        width > 0 && width <= full_width && height > 0 && height <= full_height;
  }
  if (found) {
    const auto offset = [&](double full, double part) {
      return static_cast<double>(
          random.below(static_cast<uint64_t>(full - part) + 1));
    };
    top = offset(full_height, height);
    left = offset(full_width, width);
  } else {
    // The largest box in the centre whose ratio is allowed.
    const double ratio = full_width / full_height;
    width = full_width;
    height = full_height;
    if (ratio < kLeastRatio) height = std::nearbyint(width / kLeastRatio);
    if (ratio > kMostRatio) width = std::nearbyint(height * kMostRatio);
    top = std::floor((full_height - height) / 2);
    left = std::floor((full_width - width) / 2);
  }
  ResizePlan plan;
  plan.left = left;
  plan.top = top;
  plan.right = left + width;
  plan.bottom = top + height;
  plan.width = plan.height = size;
  plan.flip = flip && random.uniform() < 0.5;
  return plan;
}

Normalise Normalise::from(
    const std::vector<double>& mean, const std::vector<double>& std) {
  Normalise normalise{};
  for (size_t c = 0; c < 3; ++c) {
    normalise.scale[c] = static_cast<float>(1.0 / (255.0 * std[c]));
    normalise.shift[c] = static_cast<float>(-mean[c] / std[c]);
  }
  return normalise;
}

/// Weights for outputs [window, window + count) of `resized`, which stretch
/// over [begin, end) of a line of `pixels`.
void Resizer::make_weights(
    Weights& weights, int64_t pixels, double begin, double end, int64_t resized,
    int64_t window, int64_t count, bool mirrored) {
  const auto low_pixel = static_cast<int64_t>(std::floor(begin));
  const int64_t line =
      std::min(pixels, static_cast<int64_t>(std::ceil(end))) - low_pixel;
  const double scale = (end - begin) / static_cast<double>(resized);
  const double support = std::max(scale, 1.0);
  const double inverse = 1.0 / support;
  const auto reach = static_cast<int64_t>(std::ceil(2.0 * support));
  weights.taps = (std::min(reach, line) + 1) / 2 * 2;
  const auto taps = static_cast<size_t>(weights.taps);
  weights.first.assign(static_cast<size_t>(count), 0);
  weights.high.assign(static_cast<size_t>(count) * taps, 0);
  weights.low.assign(static_cast<size_t>(count) * taps, 0);
  std::vector<double> share;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t output = window + (mirrored ? count - 1 - i : i);
    const double center = begin - static_cast<double>(low_pixel) +
                          (static_cast<double>(output) + 0.5) * scale;
    const auto from =
        std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const auto to =
        std::min<int64_t>(line, static_cast<int64_t>(center + support + 0.5));
    double sum = 0;
    share.clear();
    for (int64_t p = from; p < to; ++p) {
      const double distance =
          std::abs((static_cast<double>(p) - center + 0.5) * inverse);
      share.push_back(std::max(0.0, 1.0 - distance));
      sum += share.back();
    }
    const auto fixed = [&](int64_t p) {
      return static_cast<int32_t>(
          0.5 + share[static_cast<size_t>(p - from)] / sum *
                    (int64_t{1} << kWeightBits));
    };
    // The outermost pixels often weigh nothing: `reach` does not count them.
    int64_t begin_pixel = from, end_pixel = to;
    while (begin_pixel < to - 1 && fixed(begin_pixel) == 0) ++begin_pixel;
    while (end_pixel > begin_pixel + 1 && fixed(end_pixel - 1) == 0) {
      --end_pixel;
    }
    // Taps that would reach over the end begin earlier and weigh nothing.
    const int64_t first =
        std::clamp<int64_t>(line - weights.taps, 0, begin_pixel);
    weights.first[static_cast<size_t>(i)] =
        static_cast<int32_t>(low_pixel + first);
    for (int64_t p = begin_pixel; p < end_pixel; ++p) {
      const auto at = static_cast<size_t>(i * weights.taps + p - first);
      const int32_t weight = fixed(p);
      weights.high[at] = static_cast<int16_t>(weight >> kHalfBits);
      weights.low[at] = static_cast<int16_t>(weight & ((1 << kHalfBits) - 1));
    }
  }
}

Resizer::Resizer(bool allow_avx2) : wide_(allow_avx2 && has_avx2()) {}

void Resizer::run(
    const Raster& raster, const ResizePlan& plan, int64_t size,
    const Normalise& normalise, float* output) {
  const auto reduction = static_cast<double>(raster.reduction);
  make_weights(
      x_, raster.width, plan.left / reduction, plan.right / reduction,
      plan.width, plan.window_left, size, plan.flip);
  make_weights(
      y_, raster.height, plan.top / reduction, plan.bottom / reduction,
      plan.height, plan.window_top, size, false);
  const int64_t first_row = y_.first.front();
  const int64_t last_row =
      std::min(raster.height, y_.first.back() + y_.taps) - 1;
  const int64_t stride = 4 * padded(size);
  rows_.resize(static_cast<size_t>(stride * (last_row - first_row + 1)));
  const auto mix_two = wide_ ? mix_row_pair_wide : mix_row_pair;
  for (int64_t y = first_row; y <= last_row; y += 2) {
    // The last of an odd number of rows is mixed twice, into the same place.
    const bool two = y < last_row;
    mix_two(
        raster.pixels + 4 * raster.width * y, two ? 4 * raster.width : 0,
        x_.first.data(), x_.high.data(), x_.low.data(), x_.taps, size,
        rows_.data() + stride * (y - first_row), two ? stride : 0);
  }

  std::vector<const uint8_t*> taps(static_cast<size_t>(y_.taps));
  const int64_t plane = size * size;
  for (int64_t y = 0; y < size; ++y) {
    // The tap that makes their number even may lie behind the last row. It
    // weighs nothing, but it is read.
    for (int64_t t = 0; t < y_.taps; ++t) {
      const int64_t row =
          std::min(y_.first[static_cast<size_t>(y)] + t, last_row);
      taps[static_cast<size_t>(t)] = rows_.data() + stride * (row - first_row);
    }
    const auto mix = wide_ ? mix_rows_wide : mix_rows;
    for (int64_t x = 0; x < size; x += kGroup) {
      float mixed[3][kGroup];
      mix(taps.data(), y_.high.data() + y * y_.taps,
          y_.low.data() + y * y_.taps, y_.taps, x, normalise, mixed);
      float* to = output + y * size + x;
      for (int64_t c = 0; c < 3; ++c, to += plane) {
        std::copy_n(mixed[c], std::min(kGroup, size - x), to);
      }
    }
  }
}

}  // namespace echelon
