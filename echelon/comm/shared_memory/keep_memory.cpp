#include "echelon/comm/shared_memory/keep_memory.h"

#include <malloc.h>

#include <climits>

namespace echelon::local {

void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
}

}  // namespace echelon::local
