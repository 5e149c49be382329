/* Gaussian blur: along rows into a ring of 16-bit rows (1/64 levels), then down the columns. */
#ifndef SELFTASK_BLUR_H
#define SELFTASK_BLUR_H

#include "lanes.h"
#include "picture.h"

/* Position i on an axis of n pixels that goes back and forth: ... 2 1 0 1 2 ... n-2 n-1 n-2 ... */
static inline int reflect(int i, int n) {
    const int period = 2 * n - 2;
    if (period == 0) return 0;
    i = (i < 0 ? -i : i) % period;
    return i < n ? i : period - i;
}

/* One row of one channel, with `radius` mirrored pixels on either side. */
static inline void fill_margins(const uint8_t *from, int width, int radius, uint8_t *to) {
    memcpy(to + radius, from, (size_t)width);
    for (int i = 1; i <= radius; i++) {
        to[radius - i] = from[i < width ? i : reflect(-i, width)];
        to[radius + width - 1 + i] = from[i < width ? width - 1 - i : reflect(width - 1 + i, width)];
    }
}

static inline void blur_row(const uint8_t *padded, int pitch, const int32_t *weights, int radius,
                            int16_t *to) {
    for (int x = 0; x < pitch; x += 32) {
        const uint8_t *at = padded + radius + x;
        lanes sum = mul_round(shift_left(load8(at), 6), splat_pair(weights));
        for (int k = 1; k <= radius; k++) {
            lanes pair = shift_left(add(load8(at - k), load8(at + k)), 6);
            sum = add(sum, mul_round(pair, splat_pair(weights + k)));
        }
        store16(to + x, sum);
    }
}

static inline void blur_column(const int16_t *const *rows, int length, const int32_t *weights,
                               int radius, uint8_t *to) {
    for (int x = 0; x < length; x += 32) {
        lanes sum = add(mul_round(load16(rows[0] + x), splat_pair(weights)), splat(32));
        for (int k = 1; k <= radius; k++) {
            lanes pair = add(load16(rows[2 * k - 1] + x), load16(rows[2 * k] + x));
            sum = add(sum, mul_round(pair, splat_pair(weights + k)));
        }
        store8(to + x, clip8(shift_right(sum, 6)));
    }
}

static void blur_rows(const picture *from, picture *to, const int32_t *weights, int radius,
                      void *work) {
    const int height = from->height, length = 3 * from->pitch;
    const int ring = height < 2 * radius + 1 ? height : 2 * radius + 1;
    const int16_t **rows = work; /* the centre, then above and below at each distance */
    int16_t *blurred = (int16_t *)(rows + (2 * radius + 8) / 8 * 8); /* whole cache lines */
    uint8_t *padded = (uint8_t *)(blurred + (size_t)ring * length);
    int done = 0;
    for (int y = 0; y < height; y++) {
        for (; done < height && done <= y + radius; done++) {
            const uint8_t *row = from->pixels + (size_t)done * length;
            int16_t *slot = blurred + (size_t)(done % ring) * length;
            for (int c = 0; c < 3; c++) {
                fill_margins(row + (size_t)c * from->pitch, from->width, radius, padded);
                blur_row(padded, from->pitch, weights, radius, slot + (size_t)c * from->pitch);
            }
        }
        rows[0] = blurred + (size_t)(y % ring) * length;
        for (int k = 1; k <= radius; k++) {
            rows[2 * k - 1] = blurred + (size_t)(reflect(y - k, height) % ring) * length;
            rows[2 * k] = blurred + (size_t)(reflect(y + k, height) % ring) * length;
        }
        blur_column(rows, length, weights, radius, to->pixels + (size_t)y * length);
    }
}

#endif
