/* Python bindings: checks of buffers, errors, memory kept between calls. Usage: see __init__.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "engine.h"

#define MOST_NUMBERS (MOST_OPERATIONS * (MOST_ARGUMENTS + 1))
#define MOST_KEPT_BYTES ((size_t)64 << 20)
#define MOST_KEPT_BLOCKS 8

static const kernels *variants[MOST_VARIANTS];
static int variant_count;

/* Memory of finished calls, for later calls. The list is accessed only while the GIL is held, and a
 * block belongs to one call from take_block to give_block, so calls in threads share none. After
 * a fork, the child loses the blocks that were in use. */
typedef struct block {
    struct block *next;
    size_t bytes; /* size of the memory after the header, which fills one cache line */
} block;
static block *kept;
static int kept_count;

static block *take_block(size_t bytes) {
    block *b = kept;
    if (b) {
        kept = b->next;
        kept_count--;
        if (b->bytes >= bytes) return b;
        free(((void **)b)[-1]);
    }
    if (bytes > SIZE_MAX / 2) return NULL;
    char *raw = malloc(bytes + 192);
    if (!raw) return NULL;
    char *aligned = raw + 64 - (uintptr_t)raw % 64 + 64;
    b = (block *)(aligned - 16);
    ((void **)b)[-1] = raw;
    b->bytes = bytes;
    return b;
}

static void give_block(block *b) {
    if (b->bytes > MOST_KEPT_BYTES || kept_count == MOST_KEPT_BLOCKS) {
        free(((void **)b)[-1]);
        return;
    }
    b->next = kept;
    kept = b;
    kept_count++;
}

static int wrong(const char *what, const char *expected) {
    PyErr_Format(PyExc_ValueError, "%s: %s is expected", what, expected);
    return -1;
}

/* Get the buffer of a uint8 array (H, W, 3); anything else raises ValueError. */
static int get_pixels(PyObject *object, Py_buffer *view, int writable) {
    const char *what = writable ? "out" : "image";
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags)) {
        PyErr_Clear();
        return wrong(what, writable ? "a writable uint8 array (H, W, 3)"
                                    : "a uint8 array (H, W, 3)");
    }
    const Py_ssize_t *n = view->shape, *step = view->strides;
    const int bytes = view->itemsize == 1 && (!view->format || !strcmp(view->format, "B"));
    if (view->ndim != 3 || !bytes || n[2] != 3 || n[0] < 1 || n[1] < 1)
        wrong(what, "a uint8 array (H, W, 3)");
    else if (n[0] > INT_MAX || n[1] > INT_MAX)
        wrong(what, "a smaller array");
    else if (step[2] != 1 || (n[1] > 1 && step[1] != 3))
        wrong(what, "pixels that follow each other, as in a slice of rows and columns,");
    else if (writable && !PyBuffer_IsContiguous(view, 'C'))
        wrong(what, "a C-contiguous array");
    else
        return 0;
    PyBuffer_Release(view);
    return -1;
}

/* Copy the numbers of a program to `to`; return their count, or -1 with a ValueError set. */
static Py_ssize_t get_numbers(PyObject *program, double *to) {
    Py_buffer view;
    Py_ssize_t count = -1;
    if (PyObject_CheckBuffer(program) &&
        !PyObject_GetBuffer(program, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
        if (view.ndim != 1 || !view.format || strcmp(view.format, "d"))
            wrong("program", "a flat sequence or array of float64");
        else if (view.shape[0] > MOST_NUMBERS)
            wrong("program", "a program of at most 64 operations");
        else {
            count = view.shape[0];
            memcpy(to, view.buf, (size_t)count * sizeof(double));
        }
        PyBuffer_Release(&view);
        return count;
    }
    PyErr_Clear();
    PyObject *items = PySequence_Fast(program, "");
    if (!items) {
        PyErr_Clear();
        return wrong("program", "a flat sequence or array of float64");
    }
    count = PySequence_Fast_GET_SIZE(items);
    if (count > MOST_NUMBERS) count = wrong("program", "a program of at most 64 operations");
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(items, i));
        if (to[i] == -1.0 && PyErr_Occurred()) {
            PyErr_Format(PyExc_ValueError, "program[%zd] is no number", i);
            count = -1;
        }
    }
    Py_DECREF(items);
    return count;
}

static const kernels *find_variant(PyObject *name) {
    for (int i = 0; i < variant_count; i++)
        if (PyUnicode_Check(name) && !PyUnicode_CompareWithASCIIString(name, variants[i]->name))
            return variants[i];
    PyErr_Format(PyExc_ValueError, "variant %R is not one of variants()", name);
    return NULL;
}

static int run_buffers(const Py_buffer *image, PyObject *program, const Py_buffer *out,
                       const kernels *with) {
    double numbers[MOST_NUMBERS];
    char message[MESSAGE_BYTES];
    plan made;
    const Py_ssize_t count = get_numbers(program, numbers);
    if (count < 0) return -1;
    if (make_plan(&made, numbers, count, (int)image->shape[0], (int)image->shape[1],
                  (int)out->shape[0], (int)out->shape[1], message)) {
        PyErr_SetString(PyExc_ValueError, message);
        return -1;
    }
    block *scratch = take_block(scratch_bytes(&made));
    if (!scratch) {
        PyErr_NoMemory();
        return -1;
    }
    const source from = {image->buf, image->strides[0]};
    Py_BEGIN_ALLOW_THREADS;
    run_plan(&made, with, from, out->buf, (char *)scratch + 16);
    Py_END_ALLOW_THREADS;
    give_block(scratch);
    return 0;
}

static PyObject *run(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Py_buffer image, out;
    const kernels *with = variants[0];
    (void)module;
    if (count != 3 && count != 4) {
        PyErr_SetString(PyExc_TypeError, "run(image, program, out[, variant])");
        return NULL;
    }
    if (count == 4 && !(with = find_variant(arguments[3]))) return NULL;
    if (get_pixels(arguments[0], &image, 0)) return NULL;
    if (get_pixels(arguments[2], &out, 1)) {
        PyBuffer_Release(&image);
        return NULL;
    }
    const int failed = run_buffers(&image, arguments[1], &out, with);
    PyBuffer_Release(&out);
    PyBuffer_Release(&image);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *list_variants(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *names = PyTuple_New(variant_count);
    for (int i = 0; names && i < variant_count; i++) {
        PyObject *name = PyUnicode_FromString(variants[i]->name);
        if (!name) Py_CLEAR(names);
        else PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(image, program, out[, variant]): see selftask.data.kernel.run"},
    {"variants", list_variants, METH_NOARGS, "Names of the variants this processor runs."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_augment", "An augmentation program on one image.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__augment(void) {
    variant_count = find_variants(variants);
    return PyModule_Create(&definition);
}
