#define ECHELON_REDUCE reduce_baseline
#include "echelon/comm/local/reduce_kernels.h"
