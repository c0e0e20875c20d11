// The names of cuBLAS that LibTorch's headers use. Its wheel is not fetched.
#pragma once
typedef struct cublasContext* cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
