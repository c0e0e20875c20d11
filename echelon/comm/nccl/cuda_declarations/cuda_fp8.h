// NCCL's and LibTorch's headers include CUDA's 8-bit numbers and name nothing
// of them but this; the real header asks for wheels that are not fetched.
#pragma once
#define __CUDA_FP8_TYPES_EXIST__
