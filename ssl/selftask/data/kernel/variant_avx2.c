/* For processors with 256-bit registers; empty if the compiler cannot build it. */
#include "detect.h"

#if HAVE_X86_VARIANTS
#include <immintrin.h> /* before the target is set: its functions set their own */
#include <stdint.h>
#include <string.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define LANES_AVX2
#define VARIANT avx2_kernels
#define VARIANT_NAME "avx2"
#include "variant.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
