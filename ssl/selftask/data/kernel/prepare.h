/* From the numbers of a program to the fixed-point constants that the kernels take. */
#ifndef SELFTASK_PREPARE_H
#define SELFTASK_PREPARE_H

#include "picture.h"

#define BILINEAR 0
#define BICUBIC 1

/* Bytes that make_filter uses, at most. */
size_t filter_bytes(int inputs, int outputs, int kind);

/* Weights that take `inputs` positions to `outputs`; `memory` moves on behind them. */
filter make_filter(int inputs, int outputs, int kind, char **memory);

point make_matrix(const double rows[12]);
point make_contrast(double factor, const int64_t sums[3], double count);
point make_hue(double turn);
point make_gray(void);
point make_solarize(double threshold);

int blur_radius(double sigma);

/* radius + 1 weights from the centre outwards, each held twice; sum with both sides is one. */
void make_gaussian(double sigma, int radius, int32_t *weights);

#endif
