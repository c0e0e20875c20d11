#define ECHELON_REDUCE reduce_avx2
#include "echelon/comm/local/reduce_kernels.h"
