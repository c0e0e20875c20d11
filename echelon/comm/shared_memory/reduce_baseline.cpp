#define ECHELON_REDUCE reduce_baseline
#include "echelon/comm/shared_memory/reduce_kernels.h"
