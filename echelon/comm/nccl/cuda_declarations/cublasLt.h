// What LibTorch's headers name of cuBLASLt. Used where its wheel is absent.
#pragma once
typedef struct cublasLtContext* cublasLtHandle_t;
