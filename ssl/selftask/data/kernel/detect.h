/* Whether this compiler builds the x86 variants. */
#ifndef SELFTASK_DETECT_H
#define SELFTASK_DETECT_H

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86_VARIANTS 1
#else
#define HAVE_X86_VARIANTS 0
#endif

#endif
