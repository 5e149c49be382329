/* What the parts of the kernel share: the picture in work, and the table of one variant. */
#ifndef SELFTASK_PICTURE_H
#define SELFTASK_PICTURE_H

#include <stddef.h>
#include <stdint.h>

#define TILE 32  /* rows handled together by the horizontal pass of a resize */
#define GUARD 64 /* bytes that may be read, never used, before and after a picture */

/* Row y holds its red, green and blue values one after the other, `pitch` bytes each; the bytes
 * from `width` to `pitch` (a multiple of 32) are padding of no meaning. A flip is only noted, and
 * done when the picture is written: every other operation gives the same mirrored or not. */
typedef struct {
    uint8_t *pixels;
    int height, width, pitch;
    int flipped;
    int gray; /* the three channels are known to be equal */
} picture;

/* The interleaved pixels a picture is read from. */
typedef struct {
    const uint8_t *pixels;
    ptrdiff_t stride; /* bytes from row to row; may be negative */
} source;

/* For each output position along one axis: `taps` weights from position `first` on, two by two in
 * 32 bits; an odd number of taps is filled up with a weight of 0, whose position may lie one behind
 * the last. Weights have `bits` fractional bits and sum to exactly one. */
typedef struct {
    const int32_t *first;
    const int32_t *weights; /* outputs x pairs */
    int taps, pairs, bits;
} filter;

enum point_kind { POINT_DIAGONAL, POINT_MATRIX, POINT_WIDE, POINT_HUE, POINT_GRAY, POINT_SOLARIZE };

/* One pointwise step; each constant is an int16 held twice (see splat_pair). */
typedef struct {
    enum point_kind kind;
    int32_t constants[16];
    float wide[12]; /* for coefficients beyond the fixed point's range */
} point;

typedef struct {
    const char *name;
    /* out of a crop whose size stays, or of a whole image */
    void (*load)(source from, picture *to);
    void (*store)(const picture *from, uint8_t *to);
    void (*resize)(source from, int rows, int columns, filter across, filter down, void *work,
                   picture *to);
    /* all steps on each pixel in turn; then, if asked, the sums of the three channels */
    void (*points)(picture *on, const point *steps, int count, int64_t *sums);
    /* weights[0..radius], twice held as above; `to` has the size of `from` */
    void (*blur)(const picture *from, picture *to, const int32_t *weights, int radius, void *work);
} kernels;


#endif
