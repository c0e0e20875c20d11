// What LibTorch's headers name of cuSOLVER. Used where its wheel is absent.
#pragma once
#include "cusolver_common.h"
typedef struct cusolverDnContext* cusolverDnHandle_t;
