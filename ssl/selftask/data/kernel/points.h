/* Pointwise steps. All steps are done on 32 pixels in registers before the next 32. After each step
 * the values are integers 0..255, as if the step had been done alone. */
#ifndef SELFTASK_POINTS_H
#define SELFTASK_POINTS_H

#include "lanes.h"
#include "picture.h"

typedef struct {
    lanes r, g, b;
} pixels;

#define CONSTANT(i) splat_pair(step->constants + (i))

/* Round a sum in units of 2^-u levels to whole levels; `unit` is 2^(15-u), for mul_round. */
static inline lanes finish(lanes sum, lanes unit) { return clip8(mul_round(sum, unit)); }

static inline pixels diagonal_step(pixels p, const point *step) {
    const lanes unit = CONSTANT(12);
    p.r = finish(add(mul_round(shift_left(p.r, 7), CONSTANT(0)), CONSTANT(3)), unit);
    p.g = finish(add(mul_round(shift_left(p.g, 7), CONSTANT(5)), CONSTANT(7)), unit);
    p.b = finish(add(mul_round(shift_left(p.b, 7), CONSTANT(10)), CONSTANT(11)), unit);
    return p;
}

static inline lanes weighted(lanes r, lanes g, lanes b, const point *step, int row) {
    lanes sum = add(mul_round(r, CONSTANT(row)), CONSTANT(row + 3));
    sum = add(sum, mul_round(g, CONSTANT(row + 1)));
    return add(sum, mul_round(b, CONSTANT(row + 2)));
}

static inline pixels matrix_step(pixels p, const point *step) {
    const lanes r = shift_left(p.r, 7), g = shift_left(p.g, 7), b = shift_left(p.b, 7);
    const lanes unit = CONSTANT(12);
    p.r = finish(weighted(r, g, b, step, 0), unit);
    p.g = finish(weighted(r, g, b, step, 4), unit);
    p.b = finish(weighted(r, g, b, step, 8), unit);
    return p;
}

static inline pixels gray_step(pixels p, const point *step) {
    const lanes r = shift_left(p.r, 7), g = shift_left(p.g, 7), b = shift_left(p.b, 7);
    p.r = p.g = p.b = finish(weighted(r, g, b, step, 0), CONSTANT(12));
    return p;
}

static inline pixels solarize_step(pixels p, const point *step) {
    const lanes below = CONSTANT(0), full = splat(255); /* below: threshold - 1 */
    p.r = if_greater(p.r, below, sub(full, p.r), p.r);
    p.g = if_greater(p.g, below, sub(full, p.g), p.g);
    p.b = if_greater(p.b, below, sub(full, p.b), p.b);
    return p;
}

/* Value of a channel at this distance from its own hue (arguments in 1/8 levels). It has all of the
 * chroma up to one sixth of the circle, and none from two sixths on. */
static inline lanes show(lanes low, lanes chroma, lanes twice, lanes distance) {
    lanes part = larger(smaller(sub(twice, distance), chroma), splat(0));
    return add(low, shift_right(add(part, splat(4)), 3));
}

/* Hue rotation in HSV without a division. Hue times chroma is an integer, so the place on the
 * circle is measured in chromas: the full circle is six chromas, red is at 0. */
static inline pixels hue_step(pixels p, const point *step) {
    const lanes high = larger(larger(p.r, p.g), p.b), low = smaller(smaller(p.r, p.g), p.b);
    const lanes chroma = shift_left(sub(high, low), 3), twice = add(chroma, chroma);
    const lanes half = add(twice, chroma), round = add(half, half);
    lanes place = sub(shift_left(sub(p.r, p.g), 3), twice); /* around blue, at -2 */
    place = if_equal(high, p.g, add(shift_left(sub(p.b, p.r), 3), twice), place);
    place = if_equal(high, p.r, shift_left(sub(p.g, p.b), 3), place);
    place = add(place, mul_round(shift_left(chroma, 4), CONSTANT(0))); /* -3 to 9 chromas */
    place = if_greater(place, half, sub(place, round), place);
    const lanes red = magnitude(place);
    lanes green = magnitude(sub(place, twice)), blue = magnitude(add(place, twice));
    green = smaller(green, sub(round, green));
    blue = smaller(blue, sub(round, blue));
    p.r = show(low, chroma, twice, red);
    p.g = show(low, chroma, twice, green);
    p.b = show(low, chroma, twice, blue);
    return p;
}

/* Matrix with coefficients of any size; rare, so in plain C. */
static pixels wide_step(pixels p, const point *step) {
    int16_t v[3][LANES], out[3][LANES];
    const float *m = step->wide;
    store16(v[0], p.r);
    store16(v[1], p.g);
    store16(v[2], p.b);
    for (int c = 0; c < 3; c++, m += 4)
        for (int i = 0; i < LANES; i++) {
            float x = m[0] * v[0][i] + m[1] * v[1][i] + m[2] * v[2][i] + m[3];
            x = x < 0.0f ? 0.0f : x > 255.0f ? 255.0f : x;
            out[c][i] = (int16_t)(x + 0.5f);
        }
    p.r = load16(out[0]);
    p.g = load16(out[1]);
    p.b = load16(out[2]);
    return p;
}

static inline pixels one_step(pixels p, const point *step) {
    switch (step->kind) {
        case POINT_DIAGONAL: return diagonal_step(p, step);
        case POINT_MATRIX: return matrix_step(p, step);
        case POINT_HUE: return hue_step(p, step);
        case POINT_GRAY: return gray_step(p, step);
        case POINT_SOLARIZE: return solarize_step(p, step);
        default: return wide_step(p, step);
    }
}

/* Ones for those of a row's last 32 pixels that belong to the image, zeros for padding. */
static inline lanes ones_up_to(int count) {
    int16_t ones[LANES];
    for (int i = 0; i < LANES; i++) ones[i] = i < count;
    return load16(ones);
}

/* This many of the widest rows are 2^24 pixels. So each of the at least 8 partial sums of 32 bits
 * stays below 2^21 * 255, a quarter of its range. */
#define ROWS_PER_SUM 256

static void change_points(picture *on, const point *steps, int count, int64_t *sums) {
    const int last = on->pitch - 32;
    const lanes full = splat(1), part = ones_up_to(on->width - last);
    sums32 red = sums_zero(), green = sums_zero(), blue = sums_zero();
    if (sums) sums[0] = sums[1] = sums[2] = 0;
    for (int y = 0; y < on->height; y++) {
        uint8_t *at = on->pixels + (size_t)y * 3 * on->pitch;
        for (int x = 0; x <= last; x += 32, at += 32) {
            pixels p = {load8(at), load8(at + on->pitch), load8(at + 2 * on->pitch)};
            for (int i = 0; i < count; i++) p = one_step(p, steps + i);
            if (count) {
                store8(at, p.r);
                store8(at + on->pitch, p.g);
                store8(at + 2 * on->pitch, p.b);
            }
            if (sums) {
                const lanes ones = x == last ? part : full;
                red = sums_add(red, p.r, ones);
                green = sums_add(green, p.g, ones);
                blue = sums_add(blue, p.b, ones);
            }
        }
        if (sums && (y % ROWS_PER_SUM == ROWS_PER_SUM - 1 || y == on->height - 1)) {
            sums[0] += sums_total(red);
            sums[1] += sums_total(green);
            sums[2] += sums_total(blue);
            red = green = blue = sums_zero();
        }
    }
}

#endif
