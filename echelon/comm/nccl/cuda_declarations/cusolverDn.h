// The names of cuSOLVER that LibTorch's headers use. Its wheel is not fetched.
#pragma once
#include "cusolver_common.h"
typedef struct cusolverDnContext* cusolverDnHandle_t;
