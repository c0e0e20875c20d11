// What LibTorch's headers name of cuBLASLt. Its wheel is not fetched.
#pragma once
typedef struct cublasLtContext* cublasLtHandle_t;
