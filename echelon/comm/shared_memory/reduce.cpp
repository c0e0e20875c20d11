#include "echelon/comm/shared_memory/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace echelon::local {
namespace {

struct Choice {
  void (*function)(Dtype, Reduction, Buffers);
  const char* name;
};

#if defined(__x86_64__)
// clang's __builtin_cpu_supports does not know F16C.
bool supports_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && supports_f16c();
  if (avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return {detail::reduce_avx512, "avx512"};
  }
  if (avx2) {
    return {detail::reduce_avx2, "avx2"};
  }
#endif
  return {detail::reduce_baseline, "x86-64"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

size_t size_of(Dtype dtype) {
  static constexpr size_t sizes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
  return sizes[static_cast<int>(dtype)];
}

const char* name_of(Dtype dtype) {
  static constexpr const char* names[] = {
      "float32", "float64", "bfloat16", "float16", "int8",
      "uint8",   "int16",   "int32",    "int64",   "bool"};
  return names[static_cast<int>(dtype)];
}

const char* name_of(Reduction op) {
  static constexpr const char* names[] = {"sum", "avg", "min", "max"};
  return names[static_cast<int>(op)];
}

void reduce(Dtype dtype, Reduction op, Buffers buffers) {
  choice().function(dtype, op, buffers);
}

const char* reduce_kernels() {
  return choice().name;
}

}  // namespace echelon::local
