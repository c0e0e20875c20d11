// What LibTorch's headers name of cuSOLVER. Its wheel is not fetched.
#pragma once
#include "cusolver_common.h"
typedef struct cusolverDnContext* cusolverDnHandle_t;
