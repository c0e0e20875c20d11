// The names of cuBLASLt that LibTorch's headers use. Its wheel is not fetched.
#pragma once
typedef struct cublasLtContext* cublasLtHandle_t;
