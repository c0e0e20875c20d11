// What LibTorch's headers name of cuBLAS. Used where its wheel is absent.
#pragma once
typedef struct cublasContext* cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
