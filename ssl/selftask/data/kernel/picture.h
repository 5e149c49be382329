/* Types shared by the kernel's parts: the image being processed, and the table of a variant. */
#ifndef SELFTASK_PICTURE_H
#define SELFTASK_PICTURE_H

#include <stddef.h>
#include <stdint.h>

#define TILE 32  /* rows handled together by the horizontal pass of a resize */
#define GUARD 64 /* bytes before and after a picture that may be read but are not used */

/* Image with its channels in separate rows. Row y holds its red, green and blue values one after
 * the other, `pitch` bytes each. The bytes from `width` to `pitch` (a multiple of 32) are padding.
 * A flip is only recorded in `flipped`, and done when the picture is stored: every other operation
 * gives the same result on a mirrored image. */
typedef struct {
    uint8_t *pixels;
    int height, width, pitch;
    int flipped;
    int gray; /* the three channels are known to be equal */
} picture;

/* Interleaved pixels from which a picture is read. */
typedef struct {
    const uint8_t *pixels;
    ptrdiff_t stride; /* bytes from row to row; may be negative */
} source;

/* Resampling weights along one axis. Each output position has `taps` weights, for the inputs from
 * position `first` on, in pairs of 32 bits. An odd number of taps is padded with a weight of 0,
 * whose position may be one past the last. Weights have `bits` fractional bits and sum to exactly
 * one. */
typedef struct {
    const int32_t *first;
    const int32_t *weights; /* outputs x pairs */
    int taps, pairs, bits;
} filter;

enum point_kind { POINT_DIAGONAL, POINT_MATRIX, POINT_WIDE, POINT_HUE, POINT_GRAY, POINT_SOLARIZE };

/* One pointwise step; each constant is an int16 stored twice (see splat_pair). */
typedef struct {
    enum point_kind kind;
    int32_t constants[16];
    float wide[12]; /* for coefficients beyond the fixed point's range */
} point;

typedef struct {
    const char *name;
    /* from a whole image, or a crop that is not resized */
    void (*load)(source from, picture *to);
    void (*store)(const picture *from, uint8_t *to);
    void (*resize)(source from, int rows, int columns, filter across, filter down, void *work,
                   picture *to);
    /* all steps on each pixel in turn; then, unless `sums` is NULL, the sums of the channels */
    void (*points)(picture *on, const point *steps, int count, int64_t *sums);
    /* weights[0..radius], stored twice as above; `to` has the size of `from` */
    void (*blur)(const picture *from, picture *to, const int32_t *weights, int radius, void *work);
} kernels;


#endif
