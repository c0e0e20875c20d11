// The names of cuSPARSE that LibTorch's headers use. Its wheel is not fetched.
#pragma once
typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;
