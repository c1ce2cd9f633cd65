/* kernels.c - the fake driver's modules and kernels, of which the host's build runs (src/device/sums.c). */
#include <stdio.h>
#include <string.h>

#include "test/device/fake_cuda/fake.h"

static int modules;

#define DECLARE(T) void tly_sums_##T(struct tly_sums);
TLY_SUMS_TYPES(DECLARE)

#define NAMED(T) {"tly_sums_" #T, tly_sums_##T},
static const struct kernel {
    const char *name;
    void (*run)(struct tly_sums);
} kernels[] = {TLY_SUMS_TYPES(NAMED)};
enum { KERNELS = sizeof kernels / sizeof *kernels };

EXPORT int cuModuleLoadData(void **out, const void *image)
{
    ENTER("cuModuleLoadData", true);
    const char *ptx = image;
    for (size_t i = 0; i < KERNELS; i++) {
        char entry[64];
        snprintf(entry, sizeof entry, ".visible .entry %s(", kernels[i].name);
        if (!strstr(ptx, entry))
            fake_die("the PTX has no %s", kernels[i].name);
    }
    modules++;
    *out = &modules;
    return fake_leave(OK);
}

EXPORT int cuModuleUnload(void *module)
{
    ENTER("cuModuleUnload", true);
    modules--;
    return fake_leave(OK);
}

EXPORT int cuModuleGetFunction(const void **out, void *module, const char *name)
{
    ENTER("cuModuleGetFunction", true);
    for (size_t i = 0; i < KERNELS; i++)
        if (strcmp(name, kernels[i].name) == 0) {
            *out = &kernels[i];
            return fake_leave(OK);
        }
    return fake_leave(NOT_FOUND);
}

EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *handle, void **arguments, void **extra)
{
    ENTER("cuLaunchKernel", true);
    struct fake_stream *s = fake_stream_of(handle);
    struct tly_sums *sums = arguments[0];
    if (!gx || gy != 1 || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || shared || extra)
        return fake_leave(INVALID_VALUE);
    struct fake_work w = {.what = SUM,
                          .out = {sums->out, sums->count * tly_format_size(sums->fold.to)},
                          .inputs = sums->fold.n,
                          .kernel = ((const struct kernel *)function)->run,
                          .sums = *sums};
    for (int i = 0; i < w.inputs; i++) {
        w.in[i] = (struct fake_range){sums->in[i], sums->count * tly_format_size(sums->fold.from)};
        if (!fake_reaches_by_kernel(s->gpu, &w.in[i]))
            fake_fatal = ILLEGAL_ADDRESS;
    }
    if (!fake_reaches_by_kernel(s->gpu, &w.out))
        fake_fatal = ILLEGAL_ADDRESS;
    if (!fake_fatal)
        fake_give(s, w);
    return fake_leave(OK); /* the next call says it */
}

int fake_kernels_left(void)
{
    return modules;
}

void fake_forget_kernels(void)
{
    modules = 0;
}
