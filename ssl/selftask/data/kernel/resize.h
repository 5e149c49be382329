/* Antialiased resizing in two passes with 8-bit values between them, as in Pillow and torch. The
 * pass along rows works on 32 rows at once, transposed so that one register holds one column. */
#ifndef SELFTASK_RESIZE_H
#define SELFTASK_RESIZE_H

#include "lanes.h"
#include "picture.h"
#include "rows.h"

/* Transpose `rows` rows of `bytes` bytes to columns of 32 int16; if there are fewer than 32 rows,
 * the last one is repeated. */
static inline void turn_tile(source from, int rows, size_t bytes, int16_t *columns) {
    const uint8_t *at[TILE];
    for (int i = 0; i < TILE; i++)
        at[i] = from.pixels + (i < rows ? i : rows - 1) * from.stride;
    size_t x = 0;
    for (; x + 16 <= bytes; x += 16) rows_to_columns(at, x, columns + x * TILE);
    if (x < bytes) {
        uint8_t rest[TILE][16] = {{0}};
        const uint8_t *rest_at[TILE];
        for (int i = 0; i < TILE; i++) {
            memcpy(rest[i], at[i] + x, bytes - x);
            rest_at[i] = rest[i];
        }
        rows_to_columns(rest_at, 0, columns + x * TILE);
    }
}

/* Columns are r g b r g b ...; the results are all red columns, then green, then blue. */
ALWAYS_INLINE void filter_columns(const int16_t *columns, filter f, int pairs, int outputs,
                                  int pitch, uint8_t *to) {
    const size_t plane = (size_t)pitch * TILE;
    const int32_t half = 1 << (f.bits - 1), *pair = f.weights;
    for (int x = 0; x < outputs; x++, to += TILE) {
        const int16_t *at = columns + (size_t)f.first[x] * 3 * TILE;
        wide r = wide_start(half), g = r, b = r;
        for (int k = 0; k < pairs; k++, at += 6 * TILE) {
            const lanes weights = splat_pair(pair++);
            r = wide_add(r, load16(at), load16(at + 3 * TILE), weights);
            g = wide_add(g, load16(at + TILE), load16(at + 4 * TILE), weights);
            b = wide_add(b, load16(at + 2 * TILE), load16(at + 5 * TILE), weights);
        }
        store8_two(to, to + plane, wide_finish(r, f.bits), wide_finish(g, f.bits));
        store8(to + 2 * plane, wide_finish(b, f.bits));
    }
}

ALWAYS_INLINE lanes filtered_at(const int16_t *at, size_t length, const int32_t *pair, int taps,
                                int bits) {
    wide sum = wide_start(1 << (bits - 1));
    for (int k = 0; k + 1 < taps; k += 2, at += 2 * length)
        sum = wide_add(sum, load16(at), load16(at + length), splat_pair(pair++));
    /* an odd last tap is paired with a weight of 0, so any row can be read for it */
    if (taps % 2) sum = wide_add(sum, load16(at), load16(at), splat_pair(pair));
    return wide_finish(sum, bits);
}

ALWAYS_INLINE void filter_rows(const int16_t *rows, filter f, int taps, picture *to) {
    const size_t length = 3 * (size_t)to->pitch;
    for (int y = 0; y < to->height; y++) {
        const int16_t *at = rows + (size_t)f.first[y] * length;
        const int32_t *pair = f.weights + (size_t)y * f.pairs;
        uint8_t *out = to->pixels + (size_t)y * length;
        size_t x = 0;
        for (; x + 64 <= length; x += 64)
            store8_two(out + x, out + x + 32, filtered_at(at + x, length, pair, taps, f.bits),
                       filtered_at(at + x + 32, length, pair, taps, f.bits));
        if (x < length) store8(out + x, filtered_at(at + x, length, pair, taps, f.bits));
    }
}

static void resize_rows(source from, int rows, int columns, filter across, filter down, void *work,
                        picture *to) {
    const size_t length = 3 * (size_t)to->pitch;
    int16_t *narrow = work; /* `rows` rows of the final width */
    int16_t *turned = narrow + (size_t)rows * length;
    uint8_t *filtered = (uint8_t *)(turned + ((size_t)columns * 3 + 16) * TILE);
    for (int y = 0; y < rows; y += TILE) {
        const int count = rows - y < TILE ? rows - y : TILE;
        const source tile = {from.pixels + y * from.stride, from.stride};
        turn_tile(tile, count, (size_t)columns * 3, turned);
        switch (across.pairs) { /* a constant number of iterations is faster */
            case 1: filter_columns(turned, across, 1, to->width, to->pitch, filtered); break;
            case 2: filter_columns(turned, across, 2, to->width, to->pitch, filtered); break;
            default: filter_columns(turned, across, across.pairs, to->width, to->pitch, filtered);
        }
        for (size_t x = 0; x < length; x += 32)
            columns_to_rows(filtered + x * TILE, count, narrow + y * length + x, length);
    }
    switch (down.taps) {
        case 2: filter_rows(narrow, down, 2, to); break;
        case 3: filter_rows(narrow, down, 3, to); break;
        case 4: filter_rows(narrow, down, 4, to); break;
        default: filter_rows(narrow, down, down.taps, to);
    }
}

#endif
