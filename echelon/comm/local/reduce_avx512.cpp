#define ECHELON_REDUCE reduce_avx512
#include "echelon/comm/local/reduce_kernels.h"
