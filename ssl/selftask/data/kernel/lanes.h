/* Vectors of thirty-two 16-bit numbers, for each instruction set.
 *
 * A variant_*.c file defines LANES_AVX512 or LANES_AVX2 (or neither: plain C), then includes this.
 * All other code but the shuffles in rows.h is written once, in terms of `lanes`. Pixels are 0..255
 * in each lane; callers keep all sums within int16. */
#ifndef SELFTASK_LANES_H
#define SELFTASK_LANES_H

#include <stdint.h>
#include <string.h>

#define LANES 32

#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE static inline
#endif

#if defined(LANES_AVX512) || defined(LANES_AVX2)
#include <immintrin.h>
#endif

#if defined(LANES_AVX512)

typedef __m512i lanes;
typedef __m512i sums32; /* partial sums, sixteen int32 */
typedef struct {
    __m512i lo, hi; /* a 32-bit sum for each lane */
} wide;

static inline lanes load8(const uint8_t *p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
/* clipped to 0..255 */
static inline void store8(uint8_t *p, lanes a) {
    a = _mm512_max_epi16(a, _mm512_setzero_si512());
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtusepi16_epi8(a));
}
static inline void store8_two(uint8_t *p, uint8_t *q, lanes a, lanes b) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    a = _mm512_permutexvar_epi64(order, _mm512_packus_epi16(a, b));
    _mm256_storeu_si256((__m256i *)p, _mm512_castsi512_si256(a));
    _mm256_storeu_si256((__m256i *)q, _mm512_extracti64x4_epi64(a, 1));
}
static inline lanes load16(const int16_t *p) { return _mm512_loadu_si512(p); }
static inline void store16(int16_t *p, lanes a) { _mm512_storeu_si512(p, a); }
static inline lanes splat(int16_t a) { return _mm512_set1_epi16(a); }
/* two constants in 32 bits, for the even and the odd lanes; the broadcast from memory is free */
static inline lanes splat_pair(const int32_t *p) { return _mm512_set1_epi32(*p); }
static inline lanes add(lanes a, lanes b) { return _mm512_add_epi16(a, b); }
static inline lanes sub(lanes a, lanes b) { return _mm512_sub_epi16(a, b); }
static inline lanes mul_round(lanes a, lanes b) { return _mm512_mulhrs_epi16(a, b); }
static inline lanes smaller(lanes a, lanes b) { return _mm512_min_epi16(a, b); }
static inline lanes larger(lanes a, lanes b) { return _mm512_max_epi16(a, b); }
static inline lanes magnitude(lanes a) { return _mm512_abs_epi16(a); }
#define shift_left(a, n) _mm512_slli_epi16(a, n)
#define shift_right(a, n) _mm512_srai_epi16(a, n)
/* a > b ? x : y */
static inline lanes if_greater(lanes a, lanes b, lanes x, lanes y) {
    return _mm512_mask_blend_epi16(_mm512_cmpgt_epi16_mask(a, b), y, x);
}
static inline lanes if_equal(lanes a, lanes b, lanes x, lanes y) {
    return _mm512_mask_blend_epi16(_mm512_cmpeq_epi16_mask(a, b), y, x);
}
static inline wide wide_start(int32_t a) {
    wide s = {_mm512_set1_epi32(a), _mm512_set1_epi32(a)};
    return s;
}
#if defined(LANES_VNNI)
#define MULTIPLY_ADD(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)
#else
#define MULTIPLY_ADD(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
#endif
static inline wide wide_add(wide s, lanes a, lanes b, lanes pair) {
    s.lo = MULTIPLY_ADD(s.lo, _mm512_unpacklo_epi16(a, b), pair);
    s.hi = MULTIPLY_ADD(s.hi, _mm512_unpackhi_epi16(a, b), pair);
    return s;
}
static inline lanes wide_finish(wide s, int bits) {
    const __m512i count = _mm512_set1_epi32(bits);
    return _mm512_packs_epi32(_mm512_srav_epi32(s.lo, count), _mm512_srav_epi32(s.hi, count));
}
static inline sums32 sums_zero(void) { return _mm512_setzero_si512(); }
static inline sums32 sums_add(sums32 s, lanes a, lanes ones) {
    return _mm512_add_epi32(s, _mm512_madd_epi16(a, ones));
}
static inline int64_t sums_total(sums32 s) {
    int32_t part[16];
    int64_t total = 0;
    _mm512_storeu_si512(part, s);
    for (int i = 0; i < 16; i++) total += part[i];
    return total;
}

#elif defined(LANES_AVX2)

typedef struct {
    __m256i a, b;
} lanes;
typedef __m256i sums32;
typedef struct {
    __m256i lo[2], hi[2];
} wide;

#define LANES_BOTH(f, x, y) \
    (lanes) { f((x).a, (y).a), f((x).b, (y).b) }

static inline lanes load8(const uint8_t *p) {
    lanes r = {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)),
               _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p + 16)))};
    return r;
}
static inline void store8(uint8_t *p, lanes x) {
    __m256i packed = _mm256_packus_epi16(x.a, x.b);
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
static inline void store8_two(uint8_t *p, uint8_t *q, lanes a, lanes b) {
    store8(p, a);
    store8(q, b);
}
static inline lanes load16(const int16_t *p) {
    lanes r = {_mm256_loadu_si256((const __m256i *)p),
               _mm256_loadu_si256((const __m256i *)(p + 16))};
    return r;
}
static inline void store16(int16_t *p, lanes x) {
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)(p + 16), x.b);
}
static inline lanes splat(int16_t x) {
    lanes r = {_mm256_set1_epi16(x), _mm256_set1_epi16(x)};
    return r;
}
static inline lanes splat_pair(const int32_t *p) {
    lanes r = {_mm256_set1_epi32(*p), _mm256_set1_epi32(*p)};
    return r;
}
static inline lanes add(lanes x, lanes y) { return LANES_BOTH(_mm256_add_epi16, x, y); }
static inline lanes sub(lanes x, lanes y) { return LANES_BOTH(_mm256_sub_epi16, x, y); }
static inline lanes mul_round(lanes x, lanes y) { return LANES_BOTH(_mm256_mulhrs_epi16, x, y); }
static inline lanes smaller(lanes x, lanes y) { return LANES_BOTH(_mm256_min_epi16, x, y); }
static inline lanes larger(lanes x, lanes y) { return LANES_BOTH(_mm256_max_epi16, x, y); }
static inline lanes magnitude(lanes x) {
    lanes r = {_mm256_abs_epi16(x.a), _mm256_abs_epi16(x.b)};
    return r;
}
#define shift_left(x, n) \
    ((lanes){_mm256_slli_epi16((x).a, n), _mm256_slli_epi16((x).b, n)})
#define shift_right(x, n) \
    ((lanes){_mm256_srai_epi16((x).a, n), _mm256_srai_epi16((x).b, n)})
static inline lanes if_greater(lanes a, lanes b, lanes x, lanes y) {
    lanes r = {_mm256_blendv_epi8(y.a, x.a, _mm256_cmpgt_epi16(a.a, b.a)),
               _mm256_blendv_epi8(y.b, x.b, _mm256_cmpgt_epi16(a.b, b.b))};
    return r;
}
static inline lanes if_equal(lanes a, lanes b, lanes x, lanes y) {
    lanes r = {_mm256_blendv_epi8(y.a, x.a, _mm256_cmpeq_epi16(a.a, b.a)),
               _mm256_blendv_epi8(y.b, x.b, _mm256_cmpeq_epi16(a.b, b.b))};
    return r;
}
static inline wide wide_start(int32_t x) {
    const __m256i all = _mm256_set1_epi32(x);
    wide s = {{all, all}, {all, all}};
    return s;
}
#define WIDE_HALF(sum, unpack, x, y, pair) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(unpack(x, y), pair))
static inline wide wide_add(wide s, lanes x, lanes y, lanes pair) {
    s.lo[0] = WIDE_HALF(s.lo[0], _mm256_unpacklo_epi16, x.a, y.a, pair.a);
    s.hi[0] = WIDE_HALF(s.hi[0], _mm256_unpackhi_epi16, x.a, y.a, pair.a);
    s.lo[1] = WIDE_HALF(s.lo[1], _mm256_unpacklo_epi16, x.b, y.b, pair.a);
    s.hi[1] = WIDE_HALF(s.hi[1], _mm256_unpackhi_epi16, x.b, y.b, pair.a);
    return s;
}
static inline lanes wide_finish(wide s, int bits) {
    const __m256i n = _mm256_set1_epi32(bits);
    lanes r = {
        _mm256_packs_epi32(_mm256_srav_epi32(s.lo[0], n), _mm256_srav_epi32(s.hi[0], n)),
        _mm256_packs_epi32(_mm256_srav_epi32(s.lo[1], n), _mm256_srav_epi32(s.hi[1], n))};
    return r;
}
static inline sums32 sums_zero(void) { return _mm256_setzero_si256(); }
static inline sums32 sums_add(sums32 s, lanes x, lanes ones) {
    s = _mm256_add_epi32(s, _mm256_madd_epi16(x.a, ones.a));
    return _mm256_add_epi32(s, _mm256_madd_epi16(x.b, ones.b));
}
static inline int64_t sums_total(sums32 s) {
    int32_t part[8];
    int64_t total = 0;
    _mm256_storeu_si256((__m256i *)part, s);
    for (int i = 0; i < 8; i++) total += part[i];
    return total;
}

#else /* plain C; a compiler may still vectorise each loop */

typedef struct {
    int16_t v[LANES];
} lanes;
typedef int64_t sums32;
typedef struct {
    int32_t v[LANES];
} wide;

#define EACH_LANE(expression) \
    lanes r;                  \
    for (int i = 0; i < LANES; i++) r.v[i] = (int16_t)(expression); \
    return r

static inline lanes load8(const uint8_t *p) { EACH_LANE(p[i]); }
static inline void store8(uint8_t *p, lanes a) {
    for (int i = 0; i < LANES; i++) p[i] = (uint8_t)(a.v[i] < 0 ? 0 : a.v[i] > 255 ? 255 : a.v[i]);
}
static inline void store8_two(uint8_t *p, uint8_t *q, lanes a, lanes b) {
    store8(p, a);
    store8(q, b);
}
static inline lanes load16(const int16_t *p) { EACH_LANE(p[i]); }
static inline void store16(int16_t *p, lanes a) { memcpy(p, a.v, sizeof a.v); }
static inline lanes splat(int16_t a) { EACH_LANE(a); }
static inline lanes splat_pair(const int32_t *p) {
    EACH_LANE(i % 2 ? (uint32_t)*p >> 16 : (uint32_t)*p & 0xFFFF);
}
static inline lanes add(lanes a, lanes b) { EACH_LANE(a.v[i] + b.v[i]); }
static inline lanes sub(lanes a, lanes b) { EACH_LANE(a.v[i] - b.v[i]); }
static inline lanes mul_round(lanes a, lanes b) {
    EACH_LANE((a.v[i] * b.v[i] + 0x4000) >> 15);
}
static inline lanes smaller(lanes a, lanes b) { EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline lanes larger(lanes a, lanes b) { EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline lanes magnitude(lanes a) { EACH_LANE(a.v[i] < 0 ? -a.v[i] : a.v[i]); }
static inline lanes shift_left(lanes a, int n) { EACH_LANE((uint16_t)a.v[i] << n); }
static inline lanes shift_right(lanes a, int n) { EACH_LANE(a.v[i] >> n); }
static inline lanes if_greater(lanes a, lanes b, lanes x, lanes y) {
    EACH_LANE(a.v[i] > b.v[i] ? x.v[i] : y.v[i]);
}
static inline lanes if_equal(lanes a, lanes b, lanes x, lanes y) {
    EACH_LANE(a.v[i] == b.v[i] ? x.v[i] : y.v[i]);
}
static inline wide wide_start(int32_t a) {
    wide s;
    for (int i = 0; i < LANES; i++) s.v[i] = a;
    return s;
}
static inline wide wide_add(wide s, lanes a, lanes b, lanes pair) {
    for (int i = 0; i < LANES; i++) s.v[i] += a.v[i] * pair.v[0] + b.v[i] * pair.v[1];
    return s;
}
static inline lanes wide_finish(wide s, int bits) {
    for (int i = 0; i < LANES; i++) {
        s.v[i] >>= bits;
        s.v[i] = s.v[i] < -32768 ? -32768 : s.v[i] > 32767 ? 32767 : s.v[i];
    }
    EACH_LANE(s.v[i]);
}
static inline sums32 sums_zero(void) { return 0; }
static inline sums32 sums_add(sums32 s, lanes a, lanes ones) {
    for (int i = 0; i < LANES; i++) s += a.v[i] * ones.v[i];
    return s;
}
static inline int64_t sums_total(sums32 s) { return s; }

#endif

/* Clip to 0..255, the range of stored pixels. */
static inline lanes clip8(lanes a) { return smaller(larger(a, splat(0)), splat(255)); }

#endif
