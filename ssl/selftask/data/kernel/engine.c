#include "engine.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "detect.h"
#include "prepare.h"

enum { CROP_RESIZE = 1, HFLIP, MATRIX, CONTRAST, HUE, GRAY, BLUR, SOLARIZE, LAST_CODE = SOLARIZE };

static const int ARGUMENTS[LAST_CODE + 1] = {0, 7, 0, 12, 1, 1, 0, 1, 1};

#define MOST_SIDE 65535
#define MOST_PIXELS (1 << 27)
#define MOST_SIGMA 100.0
#define MOST_COEFFICIENT 1e6

#define FAIL(...)                                        \
    do {                                                 \
        snprintf(message, MESSAGE_BYTES, __VA_ARGS__);   \
        return -1;                                       \
    } while (0)

static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
static int pitch_of(int width) { return (width + 31) / 32 * 32; }
static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static size_t picture_bytes(int height, int width) {
    return whole_lines((size_t)height * 3 * (size_t)pitch_of(width)) + 2 * GUARD;
}

static size_t resize_bytes(int rows, int columns, int width) {
    const size_t length = 3 * (size_t)pitch_of(width);
    return (size_t)rows * length * 2 + ((size_t)columns * 3 + 16) * TILE * 2 + length * TILE;
}

static size_t blur_bytes(int height, int width, int radius) {
    const size_t ring = height < 2 * radius + 1 ? (size_t)height : 2 * (size_t)radius + 1;
    const size_t pitch = (size_t)pitch_of(width);
    return whole_lines(((size_t)radius + 1) * 4) + (2 * (size_t)radius + 8) / 8 * 64 +
           ring * 3 * pitch * 2 + 9 * (pitch + 2 * (size_t)radius + 64);
}

static int whole(double value, double least, double largest) {
    return value >= least && value <= largest && value == floor(value);
}

static int check_size(int height, int width, char *message) {
    if (height < 1 || width < 1 || height > MOST_SIDE || width > MOST_SIDE)
        FAIL("an image of %d x %d pixels (width x height); sides of 1 to %d are possible", width,
             height, MOST_SIDE);
    if ((double)pitch_of(width) * height > MOST_PIXELS)
        FAIL("an image of %d x %d pixels; at most %d pixels are possible", width, height,
             MOST_PIXELS);
    return 0;
}

static int check_crop(const double *a, int height, int width, int at, char *message) {
    if (!whole(a[0], 0, width) || !whole(a[1], 0, height) || !whole(a[2], 1, width) ||
        !whole(a[3], 1, height) || a[0] + a[2] > width || a[1] + a[3] > height)
        FAIL("operation %d: crop left %g, top %g, width %g, height %g; whole numbers inside the "
             "image of %d x %d pixels are expected", at, a[0], a[1], a[2], a[3], width, height);
    if (!whole(a[4], 1, MOST_SIDE) || !whole(a[5], 1, MOST_SIDE))
        FAIL("operation %d: resize to %g rows of %g; whole numbers from 1 to %d are expected", at,
             a[4], a[5], MOST_SIDE);
    if (a[6] != BILINEAR && a[6] != BICUBIC)
        FAIL("operation %d: filter %g; 0 (bilinear) or 1 (bicubic) is expected", at, a[6]);
    if (check_size((int)a[3], (int)a[5], message)) return -1; /* image between the two passes */
    return check_size((int)a[4], (int)a[5], message);
}

static void reserve_crop(plan *made, const double *a, int height, int width) {
    const int columns = (int)a[2], rows = (int)a[3], to_height = (int)a[4], to_width = (int)a[5];
    const int kind = (int)a[6];
    if (made->count) made->copy_bytes = most(made->copy_bytes, (size_t)height * width * 3);
    if (rows == to_height && columns == to_width) return;
    made->work_bytes =
        most(made->work_bytes, filter_bytes(columns, to_width, kind) +
                                   filter_bytes(rows, to_height, kind) +
                                   resize_bytes(rows, columns, to_width));
}

/* Check one operation's arguments and reserve its memory; a crop also changes the size. */
static int check_operation(plan *made, const operation *o, int *height, int *width, char *message) {
    const double *a = o->arguments;
    const int at = made->count;
    if (o->code == CROP_RESIZE) {
        if (check_crop(a, *height, *width, at, message)) return -1;
        reserve_crop(made, a, *height, *width);
        *height = (int)a[4];
        *width = (int)a[5];
    }
    for (int i = 0; (o->code == MATRIX || o->code == CONTRAST) && i < ARGUMENTS[o->code]; i++)
        if (fabs(a[i]) > MOST_COEFFICIENT)
            FAIL("operation %d: coefficient %g; at most %g is possible", at, a[i],
                 MOST_COEFFICIENT);
    if (o->code == BLUR) {
        if (!(a[0] > 0.0 && a[0] <= MOST_SIGMA))
            FAIL("operation %d: blur by sigma %g; above 0 and up to %g is expected", at, a[0],
                 MOST_SIGMA);
        made->work_bytes = most(made->work_bytes, blur_bytes(*height, *width, blur_radius(a[0])));
    }
    made->picture_bytes = most(made->picture_bytes, picture_bytes(*height, *width));
    return 0;
}

int make_plan(plan *made, const double *program, ptrdiff_t length, int height, int width,
              int out_height, int out_width, char *message) {
    if (check_size(height, width, message)) return -1;
    made->height = height;
    made->width = width;
    made->picture_bytes = made->copy_bytes = made->work_bytes = 0;
    made->count = 0;
    for (ptrdiff_t i = 0; i < length; i++)
        if (!isfinite(program[i])) FAIL("program[%td] is %g", i, program[i]);
    for (ptrdiff_t i = 0; i < length; made->count++) {
        if (made->count == MOST_OPERATIONS)
            FAIL("a program of more than %d operations", MOST_OPERATIONS);
        operation *o = made->operations + made->count;
        if (!whole(program[i], 1, LAST_CODE))
            FAIL("program[%td] is %g; an operation, 1 to %d, is expected", i, program[i],
                 LAST_CODE);
        o->code = (int)program[i++];
        if (length - i < ARGUMENTS[o->code])
            FAIL("operation %d (code %d) takes %d numbers; %td are left", made->count, o->code,
                 ARGUMENTS[o->code], length - i);
        for (int k = 0; k < ARGUMENTS[o->code]; k++) o->arguments[k] = program[i++];
        if (check_operation(made, o, &height, &width, message)) return -1;
    }
    made->picture_bytes = most(made->picture_bytes, picture_bytes(height, width));
    if (height != out_height || width != out_width)
        FAIL("out has %d rows of %d pixels; the program makes %d rows of %d", out_height, out_width,
             height, width);
    return 0;
}

size_t scratch_bytes(const plan *p) {
    return 2 * p->picture_bytes + whole_lines(p->copy_bytes) + whole_lines(p->work_bytes) + 64;
}

/* The state between operations. */
typedef struct {
    const kernels *with;
    source from;   /* what the first operation reads */
    picture now;   /* pixels: NULL before the first operation that makes a picture */
    uint8_t *here, *spare; /* now.pixels is `here` once it is set */
    uint8_t *copy;
    char *work;
    point waiting[MOST_OPERATIONS];
    int count; /* number of waiting steps */
} state;

static void set_size(state *s, int height, int width) {
    s->now.pixels = s->here;
    s->now.gray = 0;
    s->now.height = height;
    s->now.width = width;
    s->now.pitch = pitch_of(width);
}

static void do_points(state *s, int64_t *sums) {
    if (s->count || sums) s->with->points(&s->now, s->waiting, s->count, sums);
    s->count = 0;
}

static void crop_resize(state *s, const double *a) {
    const int columns = (int)a[2], rows = (int)a[3], height = (int)a[4], width = (int)a[5];
    int left = (int)a[0];
    if (s->now.pixels) { /* crop of the current picture: through an interleaved copy */
        if (s->now.flipped) left = s->now.width - left - columns;
        const int flipped = s->now.flipped;
        do_points(s, NULL);
        s->now.flipped = 0;
        s->with->store(&s->now, s->copy);
        s->now.flipped = flipped;
        s->from.pixels = s->copy;
        s->from.stride = 3 * (ptrdiff_t)s->now.width;
    }
    source crop = {s->from.pixels + (int)a[1] * s->from.stride + 3 * (ptrdiff_t)left,
                   s->from.stride};
    set_size(s, height, width);
    if (rows == height && columns == width) {
        s->with->load(crop, &s->now);
        return;
    }
    char *memory = s->work;
    filter across = make_filter(columns, width, (int)a[6], &memory), down = across;
    if (rows != columns || height != width) down = make_filter(rows, height, (int)a[6], &memory);
    s->with->resize(crop, rows, columns, across, down, memory, &s->now);
}

static void blur(state *s, double sigma) {
    const int radius = blur_radius(sigma);
    int32_t *weights = (int32_t *)s->work;
    picture to = s->now;
    make_gaussian(sigma, radius, weights);
    to.pixels = s->spare;
    s->with->blur(&s->now, &to, weights, radius, s->work + whole_lines(((size_t)radius + 1) * 4));
    s->spare = s->here;
    s->here = to.pixels;
    s->now = to;
}

static void contrast(state *s, double factor) {
    int64_t sums[3];
    do_points(s, sums);
    s->waiting[s->count++] =
        make_contrast(factor, sums, (double)s->now.height * (double)s->now.width);
}

static void do_operation(state *s, const operation *o) {
    const double *a = o->arguments;
    switch (o->code) {
        case CROP_RESIZE: crop_resize(s, a); break;
        case HFLIP: s->now.flipped = !s->now.flipped; break;
        case MATRIX:
            s->waiting[s->count++] = make_matrix(a);
            s->now.gray = 0;
            break;
        case CONTRAST: contrast(s, a[0]); break;
        case HUE: s->waiting[s->count++] = make_hue(a[0]); break;
        case GRAY:
            s->waiting[s->count++] = make_gray();
            s->now.gray = 1; /* contrast, hue, blur and solarize keep it gray */
            break;
        case BLUR:
            do_points(s, NULL);
            blur(s, a[0]);
            break;
        default: s->waiting[s->count++] = make_solarize(a[0]);
    }
}

void run_plan(const plan *p, const kernels *with, source image, uint8_t *out, void *scratch) {
    state s;
    s.with = with;
    s.from = image;
    s.here = (uint8_t *)scratch + GUARD;
    s.spare = s.here + p->picture_bytes;
    s.copy = (uint8_t *)scratch + 2 * p->picture_bytes;
    s.work = (char *)s.copy + whole_lines(p->copy_bytes);
    s.count = 0;
    memset(&s.now, 0, sizeof s.now);
    for (int i = 0; i < p->count; i++) {
        if (i == 0 && p->operations[0].code != CROP_RESIZE) {
            set_size(&s, p->height, p->width);
            with->load(image, &s.now);
        }
        do_operation(&s, p->operations + i);
    }
    if (p->count == 0) {
        set_size(&s, p->height, p->width);
        with->load(image, &s.now);
    }
    do_points(&s, NULL);
    with->store(&s.now, out);
}

extern const kernels plain_kernels;
#if HAVE_X86_VARIANTS
extern const kernels avx2_kernels, avx512_kernels, vnni_kernels;
#endif

int find_variants(const kernels *found[MOST_VARIANTS]) {
    int count = 0;
#if HAVE_X86_VARIANTS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        if (__builtin_cpu_supports("avx512vnni")) found[count++] = &vnni_kernels;
        found[count++] = &avx512_kernels;
    }
    if (__builtin_cpu_supports("avx2")) found[count++] = &avx2_kernels;
#endif
    found[count++] = &plain_kernels;
    return count;
}
