/* verbs.c - opens libibverbs.so.1 and fills tly_verbs from it.
 *
 * Each function is looked up with its version, because a library has two of most: 1.0 has other structs.  The library stays
 * open until the process ends. */
#include "transport/rdma/verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

struct tly_verbs tly_verbs;

static const struct {
    const char *symbol, *version;
    size_t at; /* in struct tly_verbs */
} verbs_calls[] = {
#define VERBS_ROW(name, symbol, version, result, arguments) \
    {#symbol, version, offsetof(struct tly_verbs, name)},
    TLY_VERBS(VERBS_ROW)};

static char verbs_missing[256]; /* why there is no library that can be used, or "" */

static void verbs_load(void)
{
    struct tly_verbs found = {0};
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(verbs_missing, sizeof verbs_missing, "%s; install the package libibverbs1 or libibverbs",
                 dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof verbs_calls / sizeof *verbs_calls; i++) {
        const char *symbol = verbs_calls[i].symbol, *version = verbs_calls[i].version;
        void *at = version ? dlvsym(library, symbol, version) : dlsym(library, symbol);
        if (!at && version) {
            snprintf(verbs_missing, sizeof verbs_missing,
                     "libibverbs.so.1 has no %s of %s; install a newer rdma-core", symbol, version);
            return;
        }
        memcpy((char *)&found + verbs_calls[i].at, &at, sizeof at);
    }
    int err = found.fork_init();
    if (err) {
        snprintf(verbs_missing, sizeof verbs_missing,
                 "ibv_fork_init: %s; this process has used RDMA without it: set RDMAV_FORK_SAFE=1",
                 strerror(err));
        return;
    }
    tly_verbs = found;
}

int tly_verbs_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, verbs_load);
    return *verbs_missing ? tly_fail(ENOTSUP, "there is no RDMA that Tally can use: %s", verbs_missing) : 0;
}
