#include "echelon/checkpoint/files/checksum_avx2.h"
#include "echelon/checkpoint/files/checksum_wide.h"

namespace echelon {

ChecksumUpdate wide_checksum_update() noexcept {
  return __builtin_cpu_supports("avx2") ? &update_checksum_avx2 : nullptr;
}

}  // namespace echelon
