// XXH3_128bits_update in AVX2 instructions, which not every x86 processor has.
// Not for others than checksum_wide.
#pragma once

#include <cstddef>

namespace echelon {

void update_checksum_avx2(void* state, const void* bytes, size_t size);

}  // namespace echelon
