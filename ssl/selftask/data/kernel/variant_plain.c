/* For every processor; also the reference that the other variants are compared with. */
#define VARIANT plain_kernels
#define VARIANT_NAME "plain"
#include "variant.h"
