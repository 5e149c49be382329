/* Layout of pixels: interleaved to planes and back, rows to columns and back. */
#ifndef SELFTASK_ROWS_H
#define SELFTASK_ROWS_H

#include "lanes.h"
#include "picture.h"

#if defined(LANES_AVX512) || defined(LANES_AVX2)

/* Sixteen pixels of one channel go to three registers of sixteen bytes, in which byte j of register
 * i holds channel (i + j) mod 3. One shuffle moves each pixel to its byte j, blends select the
 * register. */
#if defined(LANES_AVX512)
typedef __mmask32 places;
#define choose(which, a, b) _mm256_mask_blend_epi8(which, a, b)
#define as_places(bytes) _mm256_movepi8_mask(bytes)
#else
typedef __m256i places;
#define choose(which, a, b) _mm256_blendv_epi8(a, b, which)
#define as_places(bytes) (bytes)
#endif

typedef struct {
    __m256i shuffle[3];
    places of[3]; /* of[t]: bytes whose place is t mod 3 */
} interleaving;

static inline interleaving make_interleaving(int inverse, int flipped) {
    interleaving made;
    uint8_t bytes[32];
    for (int c = 0; c < 3; c++) {
        for (int j = 0; j < 16; j++) {
            int at = (16 * ((c + 3 * 16 - j) % 3) + j) / 3;
            if (inverse)
                bytes[j] = (uint8_t)((3 * j + c) % 16);
            else
                bytes[j] = (uint8_t)(flipped ? 15 - at : at);
        }
        memcpy(bytes + 16, bytes, 16);
        made.shuffle[c] = _mm256_loadu_si256((const __m256i *)bytes);
        for (int j = 0; j < 16; j++) bytes[j] = j % 3 == c ? 0xFF : 0;
        memcpy(bytes + 16, bytes, 16);
        made.of[c] = as_places(_mm256_loadu_si256((const __m256i *)bytes));
    }
    return made;
}

static inline __m256i two_halves(const uint8_t *low, const uint8_t *high) {
    __m256i half = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low));
    return _mm256_inserti128_si256(half, _mm_loadu_si128((const __m128i *)high), 1);
}

static inline __m256i pick(const interleaving *by, int first, __m256i a, __m256i b, __m256i c) {
    return choose(by->of[(first + 2) % 3], choose(by->of[(first + 1) % 3], a, b), c);
}

/* Interleave 32 pixels; if flipped, `from` points to the one that is written last. */
static inline void weave(const interleaving *by, const uint8_t *from, int pitch, int flipped,
                         uint8_t *to) {
    __m256i p[3];
    for (int c = 0; c < 3; c++) {
        const uint8_t *at = from + (ptrdiff_t)c * pitch;
        p[c] = flipped ? two_halves(at + 16, at) : two_halves(at, at + 16);
        p[c] = _mm256_shuffle_epi8(p[c], by->shuffle[c]);
    }
    for (int i = 0; i < 3; i++) {
        __m256i out = pick(by, (3 - i) % 3, p[0], p[1], p[2]);
        _mm_storeu_si128((__m128i *)(to + 16 * i), _mm256_castsi256_si128(out));
        _mm_storeu_si128((__m128i *)(to + 48 + 16 * i), _mm256_extracti128_si256(out, 1));
    }
}

static inline void unweave(const interleaving *by, const uint8_t *from, uint8_t *to, int pitch) {
    __m256i v[3];
    for (int i = 0; i < 3; i++) v[i] = two_halves(from + 16 * i, from + 48 + 16 * i);
    for (int c = 0; c < 3; c++) {
        /* byte j comes from register (c - j) mod 3: from v[0] if j = c mod 3, and so on down */
        __m256i p = choose(by->of[(c + 2) % 3], v[0], v[1]);
        p = choose(by->of[(c + 1) % 3], p, v[2]);
        p = _mm256_shuffle_epi8(p, by->shuffle[c]);
        _mm256_storeu_si256((__m256i *)(to + (ptrdiff_t)c * pitch), p);
    }
}

/* Reverse sixteen bytes. */
static inline void reverse16(const uint8_t *from, uint8_t *to) {
    const __m128i order = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(bytes, order));
}

#define UNPACK_ROUND(to, from)                                        \
    for (int i = 0; i < 8; i++) {                                     \
        to[2 * i] = _mm256_unpacklo_epi8(from[i], from[i + 8]);       \
        to[2 * i + 1] = _mm256_unpackhi_epi8(from[i], from[i + 8]);   \
    }

/* Two 16x16 transposes, one in each half of the registers. Each round of unpacking rotates the
 * eight bits of (row, column) by one place. */
static inline void transpose(__m256i r[16]) {
    __m256i s[16];
    UNPACK_ROUND(s, r)
    UNPACK_ROUND(r, s)
    UNPACK_ROUND(s, r)
    UNPACK_ROUND(r, s)
}

static inline lanes widened(__m256i bytes) {
#if defined(LANES_AVX512)
    return _mm512_cvtepu8_epi16(bytes);
#else
    lanes made = {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)),
                  _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1))};
    return made;
#endif
}

/* sixteen bytes of 32 rows -> sixteen columns of 32 rows, as int16 */
static inline void rows_to_columns(const uint8_t *const *rows, size_t at, int16_t *to) {
    __m256i r[16];
    for (int i = 0; i < 16; i++) r[i] = two_halves(rows[i] + at, rows[i + 16] + at);
    transpose(r);
    for (int i = 0; i < 16; i++) store16(to + (size_t)i * TILE, widened(r[i]));
}

/* 32 columns of 32 rows -> `count` rows of 32, as int16 */
static inline void columns_to_rows(const uint8_t *columns, int count, int16_t *to, size_t pitch) {
    for (int half = 0; half < count; half += 16) {
        __m256i r[16];
        for (int i = 0; i < 16; i++)
            r[i] = two_halves(columns + i * TILE + half, columns + (i + 16) * TILE + half);
        transpose(r);
        for (int i = 0; i < 16 && half + i < count; i++)
            store16(to + (size_t)(half + i) * pitch, widened(r[i]));
    }
}

#else

typedef struct {
    int unused;
} interleaving;

static inline interleaving make_interleaving(int inverse, int flipped) {
    interleaving made = {inverse + flipped};
    return made;
}
static inline void weave(const interleaving *by, const uint8_t *from, int pitch, int flipped,
                         uint8_t *to) {
    (void)by;
    for (int i = 0; i < 32; i++)
        for (int c = 0; c < 3; c++)
            to[3 * i + c] = from[(ptrdiff_t)c * pitch + (flipped ? 31 - i : i)];
}
static inline void unweave(const interleaving *by, const uint8_t *from, uint8_t *to, int pitch) {
    (void)by;
    for (int i = 0; i < 32; i++)
        for (int c = 0; c < 3; c++) to[(ptrdiff_t)c * pitch + i] = from[3 * i + c];
}
static inline void reverse16(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = from[15 - i];
}
static inline void rows_to_columns(const uint8_t *const *rows, size_t at, int16_t *to) {
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < 16; j++) to[j * TILE + i] = rows[i][at + j];
}
static inline void columns_to_rows(const uint8_t *columns, int count, int16_t *to, size_t pitch) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < 32; j++) to[(size_t)i * pitch + j] = columns[j * TILE + i];
}

#endif

static void load_rows(source from, picture *to) {
    interleaving by = make_interleaving(1, 0);
    for (int y = 0; y < to->height; y++) {
        const uint8_t *row = from.pixels + y * from.stride;
        uint8_t *at = to->pixels + (size_t)y * 3 * to->pitch;
        int x = 0;
        for (; x + 32 <= to->width; x += 32) unweave(&by, row + 3 * (size_t)x, at + x, to->pitch);
        if (x < to->width) {
            uint8_t rest[96] = {0};
            memcpy(rest, row + 3 * (size_t)x, 3 * (size_t)(to->width - x));
            unweave(&by, rest, at + x, to->pitch);
        }
    }
}

static void store_rows(const picture *from, uint8_t *to) {
    interleaving by = make_interleaving(0, from->flipped);
    const int w = from->width, flipped = from->flipped;
    for (int y = 0; y < from->height; y++) {
        const uint8_t *row = from->pixels + (size_t)y * 3 * from->pitch;
        uint8_t *at = to + (size_t)y * 3 * w;
        int x = 0;
        for (; x + 32 <= w; x += 32)
            weave(&by, row + (flipped ? w - 32 - x : x), from->pitch, flipped, at + 3 * (size_t)x);
        if (x < w) { /* if flipped, this reads up to 31 bytes before the row and drops them */
            uint8_t rest[96];
            weave(&by, row + (flipped ? w - 32 - x : x), from->pitch, flipped, rest);
            memcpy(at + 3 * (size_t)x, rest, 3 * (size_t)(w - x));
        }
    }
}

#endif
