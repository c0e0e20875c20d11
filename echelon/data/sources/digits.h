// The handwritten digits that ship with the library: see data/README.md.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace echelon {

struct Digits {
  static constexpr int64_t kSamples = 1797;
  static constexpr int64_t kSize = 8;  // height and width
  static constexpr int64_t kClasses = 10;
  static constexpr int kMaxInk = 16;  // pixels are 0 (paper) to 16

  std::vector<std::array<uint8_t, kSize * kSize>> pixels;  // row by row
  std::vector<uint8_t> labels;                             // 0 to 9
};

/// Unpacks the digits, which are part of the program (2 ms).
Digits load_digits();

}  // namespace echelon
