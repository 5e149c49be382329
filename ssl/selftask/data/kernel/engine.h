/* A program checked against the sizes of its pictures, and ready to run without further checks. */
#ifndef SELFTASK_ENGINE_H
#define SELFTASK_ENGINE_H

#include <stddef.h>

#include "picture.h"

#define MOST_OPERATIONS 64
#define MOST_ARGUMENTS 12
#define MESSAGE_BYTES 256
#define MOST_VARIANTS 4

typedef struct {
    int code;
    double arguments[MOST_ARGUMENTS];
} operation;

typedef struct {
    operation operations[MOST_OPERATIONS];
    int count;
    int height, width; /* of the image */
    /* bytes of: each of the two pictures, the interleaved copy for a late crop, everything else */
    size_t picture_bytes, copy_bytes, work_bytes;
} plan;

/* 0, or -1 with a message for the user. */
int make_plan(plan *made, const double *program, ptrdiff_t length, int height, int width,
              int out_height, int out_width, char *message);

size_t scratch_bytes(const plan *p);

/* `scratch`: 64-byte aligned, scratch_bytes(p) long; `out`: the size that make_plan was given. */
void run_plan(const plan *p, const kernels *with, source image, uint8_t *out, void *scratch);

/* The variants this processor runs, best first; their number. */
int find_variants(const kernels *found[MOST_VARIANTS]);

#endif
