/* Stands in for libcuda: the declarations are those of cuda.h 13.0, memory of the device is the host's, and copies are
   made at once, in an order that begins in the middle. What the header forbids is refused, and what was asked is noted. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef uint64_t cuuint64_t;
typedef struct { unsigned type; int id; } CUmemLocation;
typedef struct {
    unsigned srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned flags;
} CUmemcpyAttributes;
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "as in cuda.h");

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, ALREADY_REGISTERED = 712,
       NOT_REGISTERED = 713, NOT_SUPPORTED = 801 };
enum { FOUND = 0, SYMBOL_NOT_FOUND = 1, VERSION_NOT_SUFFICIENT = 2 };

/* What tests set and read. */
int standin_version = 13000;        /* of the driver */
int standin_refuses_batches = 0;    /* an error for each */
size_t standin_batches = 0, standin_singles = 0, standin_largest = 0, standin_lockable = SIZE_MAX;
struct { uintptr_t begin; size_t size; } standin_registered[64];
size_t standin_num_registered = 0, standin_synchronized[2] = {0, 0}; /* the latter per GPU */
unsigned standin_flags = 0;         /* of the last registration */
static _Thread_local uintptr_t contexts[8];
static _Thread_local size_t depth = 0;

static int in_one_registration(CUdeviceptr at, size_t size) {
    for (size_t i = 0; i < standin_num_registered; i++) {
        uintptr_t begin = standin_registered[i].begin, end = begin + standin_registered[i].size;
        if (at < end && at + size > begin && !(at >= begin && at + size <= end)) return 0;
    }
    return 1;
}

static int is_wrong(CUdeviceptr dst, CUdeviceptr src, size_t size) {
    return !dst || !src || !size || !in_one_registration(src, size) || !in_one_registration(dst, size);
}

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                      size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream stream) {
    if (standin_refuses_batches) return standin_refuses_batches;
    *failIdx = SIZE_MAX;
    if ((uintptr_t)stream < 2 || !count || !numAttrs || numAttrs > count || attrsIdxs[0]) return INVALID_VALUE;
    for (size_t i = 0; i < numAttrs; i++) {
        if (i && attrsIdxs[i] <= attrsIdxs[i - 1]) return INVALID_VALUE;
        if (attrsIdxs[i] >= count || attrs[i].srcAccessOrder < 1 || attrs[i].srcAccessOrder > 3) return INVALID_VALUE;
        if (attrs[i].flags > 1) return INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        *failIdx = i;
        if (is_wrong(dsts[i], srcs[i], sizes[i])) return INVALID_VALUE;
        for (size_t j = 0; j < count; j++) { /* what would need an order */
            if (i != j && dsts[i] < dsts[j] + sizes[j] && dsts[j] < dsts[i] + sizes[i]) return INVALID_VALUE;
            if (dsts[i] < srcs[j] + sizes[j] && srcs[j] < dsts[i] + sizes[i]) return INVALID_VALUE;
        }
    }
    for (size_t i = 0; i < count; i++) {
        size_t each = (i + count / 2) % count;
        memcpy((void *)(uintptr_t)dsts[each], (void *)(uintptr_t)srcs[each], sizes[each]);
    }
    standin_batches++;
    if (count > standin_largest) standin_largest = count;
    return SUCCESS;
}

/* What CUDA 13 calls by the same name: one argument less. */
static CUresult batch_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                         size_t *attrsIdxs, size_t numAttrs, CUstream stream) {
    (void)dsts, (void)srcs, (void)sizes, (void)count, (void)attrs, (void)attrsIdxs, (void)numAttrs, (void)stream;
    return NOT_FOUND;
}

static CUresult single(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream) {
    if ((uintptr_t)stream < 2 || is_wrong(dst, src, size)) return INVALID_VALUE;
    memcpy((void *)(uintptr_t)dst, (void *)(uintptr_t)src, size);
    standin_singles++;
    return SUCCESS;
}

static CUresult device_get(int *device, int ordinal) {
    if (ordinal < 0 || ordinal > 1) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

static CUresult retain(void **context, int device) {
    *context = (void *)(uintptr_t)(device + 1);
    return SUCCESS;
}

static CUresult push(void *context) {
    if (!context || depth == 8) return INVALID_CONTEXT;
    contexts[depth++] = (uintptr_t)context;
    return SUCCESS;
}

static CUresult pop(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)contexts[--depth];
    return SUCCESS;
}

static CUresult host_register(void *p, size_t size, unsigned flags) {
    if (!depth) return INVALID_CONTEXT;
    standin_flags = flags;
    if (!p || !size || flags > 15 || (uintptr_t)p % 4096) return INVALID_VALUE;
    size_t sum = size;
    for (size_t i = 0; i < standin_num_registered; i++) {
        sum += standin_registered[i].size;
        if (standin_registered[i].begin == (uintptr_t)p) return ALREADY_REGISTERED;
    }
    if (sum > standin_lockable || standin_num_registered == 64) return OUT_OF_MEMORY;
    standin_registered[standin_num_registered].begin = (uintptr_t)p;
    standin_registered[standin_num_registered++].size = size;
    return SUCCESS;
}

static CUresult synchronize(void) {
    if (!depth) return INVALID_CONTEXT;
    standin_synchronized[contexts[depth - 1] - 1]++;
    return SUCCESS;
}

static CUresult host_unregister(void *p) {
    if (!depth) return INVALID_CONTEXT;
    for (size_t i = 0; i < standin_num_registered; i++)
        if (standin_registered[i].begin == (uintptr_t)p) {
            standin_registered[i] = standin_registered[--standin_num_registered];
            return SUCCESS;
        }
    return NOT_REGISTERED;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags, int *status) {
    static const struct { const char *name; int since; void *function; } known[] = {
        {"cuMemcpyBatchAsync", 13000, (void *)batch_v2},  {"cuMemcpyBatchAsync", 12080, (void *)batch},
        {"cuMemcpyAsync", 4000, (void *)single},          {"cuMemHostRegister", 6050, (void *)host_register},
        {"cuMemHostUnregister", 4000, (void *)host_unregister}, {"cuCtxSynchronize", 2000, (void *)synchronize},
        {"cuDeviceGet", 2000, (void *)device_get},        {"cuDevicePrimaryCtxRetain", 7000, (void *)retain},
        {"cuCtxPushCurrent", 4000, (void *)push},         {"cuCtxPopCurrent", 4000, (void *)pop},
    };
    (void)flags;
    *status = SYMBOL_NOT_FOUND;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(symbol, known[i].name)) continue;
        *status = VERSION_NOT_SUFFICIENT;
        if (known[i].since > version || known[i].since > standin_version) continue;
        *pfn = known[i].function;
        *status = FOUND;
        return SUCCESS;
    }
    *pfn = NULL;
    return NOT_FOUND;
}
