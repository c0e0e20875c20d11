#define ECHELON_REDUCE reduce_avx512
#include "echelon/comm/shared_memory/reduce_kernels.h"
