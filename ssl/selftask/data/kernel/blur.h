/* Gaussian blur: along rows into a ring buffer of 16-bit rows (1/64 levels), then along columns. */
#ifndef SELFTASK_BLUR_H
#define SELFTASK_BLUR_H

#include "lanes.h"
#include "picture.h"
#include "rows.h"

/* Position i on an axis of n pixels reflected at both ends: ... 2 1 0 1 2 ... n-2 n-1 n-2 ... */
static inline int reflect(int i, int n) {
    const int period = 2 * n - 2;
    if (period == 0) return 0;
    i = (i < 0 ? -i : i) % period;
    return i < n ? i : period - i;
}

/* Copy one row of one channel, with `radius` reflected pixels on either side. Up to 16 bytes before
 * and after them may be overwritten too. */
static inline void fill_margins(const uint8_t *from, int width, int radius, uint8_t *to) {
    uint8_t *right = to + radius + width;
    memcpy(to + radius, from, (size_t)width);
    if (radius <= 16 && width > 16) {
        reverse16(from + 1, to + radius - 16);
        reverse16(from + width - 17, right);
        return;
    }
    for (int i = 1; i <= radius; i++) {
        to[radius - i] = from[reflect(-i, width)];
        right[i - 1] = from[reflect(width - 1 + i, width)];
    }
}

/* Convert a row to int16 in 1/64 levels, once instead of for each tap. */
static inline void widen_row(const uint8_t *from, int count, int16_t *to) {
    for (int x = 0; x < count; x += 32) store16(to + x, shift_left(load8(from + x), 6));
}

ALWAYS_INLINE lanes along_row(const int16_t *at, const int32_t *weights, int radius) {
    lanes sum = mul_round(load16(at), splat_pair(weights));
    for (int k = 1; k <= radius; k++)
        sum = add(sum, mul_round(add(load16(at - k), load16(at + k)), splat_pair(weights + k)));
    return sum;
}

ALWAYS_INLINE void blur_row(const int16_t *row, int pitch, const int32_t *weights, int radius,
                            int16_t *to) {
    for (int x = 0; x < pitch; x += 32)
        store16(to + x, along_row(row + radius + x, weights, radius));
}

ALWAYS_INLINE lanes down_column(const int16_t *const *rows, int x, const int32_t *weights,
                                int radius) {
    lanes sum = add(mul_round(load16(rows[0] + x), splat_pair(weights)), splat(32));
    for (int k = 1; k <= radius; k++) {
        const lanes both = add(load16(rows[2 * k - 1] + x), load16(rows[2 * k] + x));
        sum = add(sum, mul_round(both, splat_pair(weights + k)));
    }
    return shift_right(sum, 6);
}

ALWAYS_INLINE void blur_column(const int16_t *const *rows, int length, const int32_t *weights,
                               int radius, uint8_t *to) {
    int x = 0;
    for (; x + 64 <= length; x += 64)
        store8_two(to + x, to + x + 32, down_column(rows, x, weights, radius),
                   down_column(rows, x + 32, weights, radius));
    if (x < length) store8(to + x, down_column(rows, x, weights, radius));
}

ALWAYS_INLINE void blur_by(const picture *from, picture *to, const int32_t *weights, int radius,
                           void *work) {
    const int height = from->height, channels = from->gray ? 1 : 3;
    const int length = channels * from->pitch;
    const int ring = height < 2 * radius + 1 ? height : 2 * radius + 1;
    const int16_t **rows = work; /* centre row, then the rows above and below at each distance */
    int16_t *blurred = (int16_t *)(rows + (2 * radius + 8) / 8 * 8); /* whole cache lines */
    /* The channels' rows with their margins, as bytes and as int16. Each step is done for all
     * channels before the next step: data just written in small units is slow to read in large
     * ones. */
    const int span = (from->pitch + 2 * radius + 31) / 32 * 32;
    int16_t *margined = blurred + (size_t)ring * length;
    uint8_t *bytes = (uint8_t *)(margined + 3 * span) + 16;
    int done = 0;
    for (int y = 0; y < height; y++) {
        for (; done < height && done <= y + radius; done++) {
            const uint8_t *row = from->pixels + (size_t)done * 3 * from->pitch;
            int16_t *slot = blurred + (size_t)(done % ring) * length;
            for (int c = 0; c < channels; c++)
                fill_margins(row + c * from->pitch, from->width, radius, bytes + c * (span + 32));
            for (int c = 0; c < channels; c++)
                widen_row(bytes + c * (span + 32), span, margined + c * span);
            for (int c = 0; c < channels; c++)
                blur_row(margined + c * span, from->pitch, weights, radius, slot + c * from->pitch);
        }
        rows[0] = blurred + (size_t)(y % ring) * length;
        for (int k = 1; k <= radius; k++) {
            rows[2 * k - 1] = blurred + (size_t)(reflect(y - k, height) % ring) * length;
            rows[2 * k] = blurred + (size_t)(reflect(y + k, height) % ring) * length;
        }
        uint8_t *out = to->pixels + (size_t)y * 3 * to->pitch;
        blur_column(rows, length, weights, radius, out);
        for (int c = channels; c < 3; c++) memcpy(out + c * to->pitch, out, (size_t)to->pitch);
    }
}

static void blur_rows(const picture *from, picture *to, const int32_t *weights, int radius,
                      void *work) {
    switch (radius) { /* a constant number of iterations makes the inner loops faster */
        case 1: blur_by(from, to, weights, 1, work); break;
        case 2: blur_by(from, to, weights, 2, work); break;
        case 3: blur_by(from, to, weights, 3, work); break;
        case 4: blur_by(from, to, weights, 4, work); break;
        case 5: blur_by(from, to, weights, 5, work); break;
        case 6: blur_by(from, to, weights, 6, work); break;
        default: blur_by(from, to, weights, radius, work);
    }
}

#endif
