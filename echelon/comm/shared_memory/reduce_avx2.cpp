#define ECHELON_REDUCE reduce_avx2
#include "echelon/comm/shared_memory/reduce_kernels.h"
