/* Antialiased resizing in two passes with 8-bit values between them, as Pillow and torch do. The
 * pass along rows works on 32 rows at once, turned so that one register holds one column. */
#ifndef SELFTASK_RESIZE_H
#define SELFTASK_RESIZE_H

#include "lanes.h"
#include "picture.h"
#include "rows.h"

/* `rows` rows (up to 32; the last is repeated) of `bytes` bytes -> columns of 32 int16 */
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
static inline void filter_columns(const int16_t *columns, filter f, int outputs, int pitch,
                                  uint8_t *to) {
    const size_t plane = (size_t)pitch * TILE;
    const int32_t *weights = f.weights;
    for (int x = 0; x < outputs; x++, to += TILE) {
        const int16_t *at = columns + (size_t)f.first[x] * 3 * TILE;
        lanes r = splat(32), g = r, b = r;
        for (int k = 0; k < f.taps; k++, at += 3 * TILE) {
            const lanes weight = splat_pair(weights++);
            r = add(r, mul_round(load16(at), weight));
            g = add(g, mul_round(load16(at + TILE), weight));
            b = add(b, mul_round(load16(at + 2 * TILE), weight));
        }
        store8(to, clip8(shift_right(r, 6)));
        store8(to + plane, clip8(shift_right(g, 6)));
        store8(to + 2 * plane, clip8(shift_right(b, 6)));
    }
}

static inline uint8_t round_wide(int32_t sum, int bits) {
    sum = (sum + (1 << (bits - 1))) >> bits;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

/* Many taps: sums of 32 bits, which a compiler vectorises well enough. */
static inline void filter_columns_wide(const int16_t *columns, filter f, int outputs, int pitch,
                                       uint8_t *to) {
    const int32_t *weights = f.weights;
    for (int x = 0; x < outputs; x++, weights += f.taps)
        for (int c = 0; c < 3; c++) {
            const int16_t *at = columns + ((size_t)f.first[x] * 3 + c) * TILE;
            int32_t sum[TILE] = {0};
            for (int k = 0; k < f.taps; k++, at += 3 * TILE)
                for (int i = 0; i < TILE; i++) sum[i] += at[i] * weights[k];
            uint8_t *out = to + ((size_t)c * pitch + x) * TILE;
            for (int i = 0; i < TILE; i++) out[i] = round_wide(sum[i], f.bits + 7);
        }
}

static inline void filter_row(const uint8_t *rows, size_t length, const int32_t *weights, int taps,
                              uint8_t *to) {
    for (size_t x = 0; x < length; x += 32) {
        const uint8_t *at = rows + x;
        lanes sum = splat(32);
        for (int k = 0; k < taps; k++, at += length)
            sum = add(sum, mul_round(shift_left(load8(at), 7), splat_pair(weights + k)));
        store8(to + x, clip8(shift_right(sum, 6)));
    }
}

static inline void filter_row_wide(const uint8_t *rows, size_t length, const int32_t *weights,
                                   int taps, int bits, uint8_t *to) {
    for (size_t x = 0; x < length; x += 32) {
        const uint8_t *at = rows + x;
        int32_t sum[32] = {0};
        for (int k = 0; k < taps; k++, at += length)
            for (int i = 0; i < 32; i++) sum[i] += at[i] * weights[k];
        for (int i = 0; i < 32; i++) to[x + i] = round_wide(sum[i], bits);
    }
}

static void resize_rows(source from, int rows, int columns, filter across, filter down,
                        uint8_t *rows_out, void *work, picture *to) {
    const size_t length = 3 * (size_t)to->pitch;
    int16_t *turned = work;
    uint8_t *filtered = (uint8_t *)(turned + ((size_t)columns * 3 + 16) * TILE);
    for (int y = 0; y < rows; y += TILE) {
        const int count = rows - y < TILE ? rows - y : TILE;
        const source tile = {from.pixels + y * from.stride, from.stride};
        turn_tile(tile, count, (size_t)columns * 3, turned);
        if (across.taps <= FINE_TAPS)
            filter_columns(turned, across, to->width, to->pitch, filtered);
        else
            filter_columns_wide(turned, across, to->width, to->pitch, filtered);
        for (size_t x = 0; x < length; x += 32)
            columns_to_rows(filtered + x * TILE, count, rows_out + y * length + x, length);
    }
    for (int y = 0; y < to->height; y++) {
        const uint8_t *at = rows_out + (size_t)down.first[y] * length;
        const int32_t *weights = down.weights + (size_t)y * down.taps;
        uint8_t *out = to->pixels + (size_t)y * length;
        if (down.taps <= FINE_TAPS)
            filter_row(at, length, weights, down.taps, out);
        else
            filter_row_wide(at, length, weights, down.taps, down.bits, out);
    }
}

#endif
