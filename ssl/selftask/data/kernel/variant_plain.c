/* For every processor, and the reference the other variants are compared with. */
#define VARIANT plain_kernels
#define VARIANT_NAME "plain"
#include "variant.h"
