// NCCL's and LibTorch's headers include CUDA's bfloat16 numbers and name
// nothing of them but this; the real header asks for wheels that are not
// fetched.
#pragma once
#define __CUDA_BF16_TYPES_EXIST__
