/* For processors with 512-bit registers; empty if the compiler cannot build it. */
#include "detect.h"

#if HAVE_X86_VARIANTS
#include <immintrin.h> /* before the target is set: its functions set their own */
#include <stdint.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")
#endif
#define LANES_AVX512
#define VARIANT avx512_kernels
#define VARIANT_NAME "avx512"
#include "variant.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
