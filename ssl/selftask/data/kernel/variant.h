/* Function table of a variant; a variant_*.c file sets the instruction set and includes this. */
#include "blur.h"
#include "points.h"
#include "resize.h"
#include "rows.h"

const kernels VARIANT = {VARIANT_NAME, load_rows, store_rows, resize_rows, change_points, blur_rows};
