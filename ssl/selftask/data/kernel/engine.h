/* A plan is a program that was checked for its image sizes and runs without further checks. */
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
    /* bytes of each of the two pictures, of the interleaved copy for a crop that is not the first
     * operation, and of all other memory */
    size_t picture_bytes, copy_bytes, work_bytes;
} plan;

/* Check a program and make its plan; return 0, or -1 with a message for the user. */
int make_plan(plan *made, const double *program, ptrdiff_t length, int height, int width,
              int out_height, int out_width, char *message);

size_t scratch_bytes(const plan *p);

/* Run a plan. `scratch`: scratch_bytes(p) bytes, 64-byte aligned; `out`: of the size that was given
 * to make_plan. */
void run_plan(const plan *p, const kernels *with, source image, uint8_t *out, void *scratch);

/* Find the variants that this processor can run, best first; return their number. */
int find_variants(const kernels *found[MOST_VARIANTS]);

#endif
