// The words with which CUDA's headers mark declarations, as a host compiler
// takes them. Their wheel is not fetched.
#pragma once

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __location__(a)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __inline_hint__

#define __annotate__(a) __attribute__((a))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ inline __attribute__((always_inline))
#define __specialization_static static

#define CUDARTAPI
#define CUDARTAPI_CDECL
