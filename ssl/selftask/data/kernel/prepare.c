#include "prepare.h"

#include <math.h>
#include <string.h>

static uint32_t fit16(int value) {
    return (uint16_t)(value > 32767 ? 32767 : value < -32767 ? -32767 : value);
}

static int32_t pair(int even, int odd) {
    const uint32_t both = fit16(even) | fit16(odd) << 16;
    int32_t made;
    memcpy(&made, &both, sizeof made);
    return made;
}

static int32_t held_twice(int value) { return pair(value, value); }

static int rounded(double value) { return (int)floor(value + 0.5); }

static double bicubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
    return 0.0;
}

static double bilinear(double x) {
    x = 1.0 - fabs(x);
    return x > 0.0 ? x : 0.0;
}

static double filter_support(double scale, int kind) {
    return (kind == BICUBIC ? 2.0 : 1.0) * (scale > 1.0 ? scale : 1.0);
}

static int most_taps(int inputs, int outputs, int kind) {
    const double taps = 2.0 * ceil(filter_support((double)inputs / outputs, kind)) + 1.0;
    return taps < inputs ? (int)taps : inputs;
}

static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t filter_bytes(int inputs, int outputs, int kind) {
    const size_t taps = (size_t)most_taps(inputs, outputs, kind), n = (size_t)outputs;
    return whole_lines(n * 4) + whole_lines(n * ((taps + 1) / 2) * 4) + whole_lines((taps + 1) * 8);
}

/* Set `first`, the first position with a weight for the output at `centre`; return their number. */
static int window(double centre, double support, int inputs, int *first) {
    const int start = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
    *first = centre - support + 0.5 < 0.0 ? 0 : start;
    return (end > inputs ? inputs : end) - *first;
}

/* Number of fractional bits with which the largest weight fits 16 bits. That weight is at most 1
 * for a tent, at most 2 for a cubic, and at most 1.25 / scale if that is less. */
static int weight_bits(double scale, int kind) {
    int bits = kind == BICUBIC ? 14 : 15;
    for (scale /= 1.25; scale >= 2.0 && bits < 20; scale /= 2.0) bits++;
    return bits;
}

/* Rounding the running sum keeps the sum of the weights exact, for any number of weights. */
static void round_weights(const double *exact, int pairs, double unit, int32_t *to) {
    double sum = 0.0;
    int before = 0;
    for (int k = 0; k < pairs; k++) {
        sum += exact[2 * k];
        const int middle = (int)(sum * unit + 0.5 + (1 << 24)) - (1 << 24);
        sum += exact[2 * k + 1];
        const int after = (int)(sum * unit + 0.5 + (1 << 24)) - (1 << 24);
        to[k] = pair(middle - before, after - middle);
        before = after;
    }
}

filter make_filter(int inputs, int outputs, int kind, char **memory) {
    const double scale = (double)inputs / outputs, support = filter_support(scale, kind);
    const double step = scale > 1.0 ? 1.0 / scale : 1.0;
    int32_t *first = (int32_t *)*memory;
    int32_t *weights = (int32_t *)(*memory + whole_lines((size_t)outputs * 4));
    int taps = 1;
    for (int i = 0; i < outputs; i++) {
        const int count = window((i + 0.5) * scale, support, inputs, first + i);
        taps = count > taps ? count : taps;
    }
    const int pairs = (taps + 1) / 2, bits = weight_bits(scale, kind);
    double *exact = (double *)((char *)weights + whole_lines((size_t)outputs * pairs * 4));
    exact[2 * pairs - 1] = 0.0; /* the padding, if the number of taps is odd */
    for (int i = 0; i < outputs; i++) {
        double total = 0.0;
        if (first[i] > inputs - taps) first[i] = inputs - taps;
        for (int k = 0; k < taps; k++) {
            const double x = (first[i] + k - (i + 0.5) * scale + 0.5) * step;
            total += exact[k] = kind == BICUBIC ? bicubic(x) : bilinear(x);
        }
        round_weights(exact, pairs, (1 << bits) / total, weights + (size_t)i * pairs);
    }
    filter made = {first, weights, taps, pairs, bits};
    *memory += filter_bytes(inputs, outputs, kind);
    return made;
}

/* Fractional bits of the 16-bit sums: 6 or 5, or 0 if the values do not fit. */
static int unit_bits(const double rows[12]) {
    int bits = 6;
    for (int c = 0; c < 3; c++, rows += 4) {
        double low = rows[3], high = rows[3], weight = 0.0;
        for (int k = 0; k < 3; k++) {
            if (rows[k] > 0.0) high += 255.0 * rows[k];
            if (rows[k] < 0.0) low += 255.0 * rows[k];
            if (fabs(rows[k]) > weight) weight = fabs(rows[k]);
        }
        if (high > 1020.0 || low < -1020.0 || weight > 4.0) return 0;
        if (high > 510.0 || low < -510.0 || weight > 2.0) bits = 5;
    }
    return bits;
}

point make_matrix(const double rows[12]) {
    point made = {POINT_WIDE, {0}, {0}};
    const int bits = unit_bits(rows);
    int crossing = 0;
    for (int i = 0; i < 12; i++) {
        made.wide[i] = (float)rows[i];
        if (i % 4 == 3)
            made.constants[i] = bits ? held_twice(rounded(rows[i] * (1 << bits))) : 0;
        else
            made.constants[i] = bits ? held_twice(rounded(rows[i] * (1 << (bits + 8)))) : 0;
        if (i % 4 != 3 && i % 4 != i / 4 && rows[i] != 0.0) crossing = 1;
    }
    made.constants[12] = held_twice(1 << (15 - bits));
    if (bits) made.kind = crossing ? POINT_MATRIX : POINT_DIAGONAL;
    return made;
}

point make_contrast(double factor, const int64_t sums[3], double count) {
    const double luma = (0.299 * sums[0] + 0.587 * sums[1] + 0.114 * sums[2]) / count;
    const double offset = (1.0 - factor) * floor(luma + 0.5);
    const double rows[12] = {factor, 0, 0, offset, 0, factor, 0, offset, 0, 0, factor, offset};
    return make_matrix(rows);
}

point make_hue(double turn) {
    point made = {POINT_HUE, {0}, {0}};
    turn -= floor(turn);
    made.constants[0] = held_twice(rounded(turn * 12288.0)); /* 6 * 32768 / 16, see hue_step */
    return made;
}

point make_gray(void) {
    point made = {POINT_GRAY, {0}, {0}};
    made.constants[0] = held_twice(rounded(0.299 * 32768));
    made.constants[1] = held_twice(rounded(0.587 * 32768));
    made.constants[2] = held_twice(rounded(0.114 * 32768));
    made.constants[12] = held_twice(256);
    return made;
}

point make_solarize(double threshold) {
    point made = {POINT_SOLARIZE, {0}, {0}};
    const double least = ceil(threshold);
    made.constants[0] = held_twice(least < 0.0 ? -1 : least > 256.0 ? 255 : (int)least - 1);
    return made;
}

int blur_radius(double sigma) {
    const double radius = ceil(3.0 * sigma);
    return radius < 1.0 ? 1 : (int)radius;
}

void make_gaussian(double sigma, int radius, int32_t *weights) {
    const double rate = -0.5 / (sigma * sigma);
    double total = 1.0, outside = 0.0;
    int before = 0;
    for (int k = 1; k <= radius; k++) total += 2.0 * exp(rate * k * k);
    for (int k = radius; k >= 1; k--) { /* round the running sum from the outside in */
        outside += exp(rate * k * k);
        const int upto = rounded(outside / total * 32768.0);
        weights[k] = held_twice(upto - before);
        before = upto;
    }
    weights[0] = held_twice(32768 - 2 * before);
}
