/* Conversion of a program's numbers to the fixed-point constants of the kernels. */
#ifndef SELFTASK_PREPARE_H
#define SELFTASK_PREPARE_H

#include "picture.h"

#define BILINEAR 0
#define BICUBIC 1

/* Maximum number of bytes that make_filter uses. */
size_t filter_bytes(int inputs, int outputs, int kind);

/* Weights that resample `inputs` positions to `outputs`; `memory` is advanced past them. */
filter make_filter(int inputs, int outputs, int kind, char **memory);

point make_matrix(const double rows[12]);
point make_contrast(double factor, const int64_t sums[3], double count);
point make_hue(double turn);
point make_gray(void);
point make_solarize(double threshold);

int blur_radius(double sigma);

/* radius + 1 weights from the centre outwards, each stored twice; with both sides they sum to 1. */
void make_gaussian(double sigma, int radius, int32_t *weights);

#endif
