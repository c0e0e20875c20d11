// The names of cuSOLVER that LibTorch's headers use. Its wheel is not fetched.
#pragma once
typedef enum {
  CUSOLVER_STATUS_SUCCESS = 0,
  CUSOLVER_STATUS_INVALID_VALUE = 3
} cusolverStatus_t;
