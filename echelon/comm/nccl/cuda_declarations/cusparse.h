// What LibTorch's headers name of cuSPARSE. Used where its wheel is absent.
#pragma once
typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;
