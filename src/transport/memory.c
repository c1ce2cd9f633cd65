/* memory.c - memory that media know of before payloads are sent from it or land in it.
 *
 * Each medium that wants to know gets each stretch, and keeps what it makes of it (a registration).  Where no medium does,
 * nothing is kept. */
#include <errno.h>
#include <stdlib.h>

#include "base/error.h"
#include "transport/medium.h"

enum { MOST = 8 };

struct tly_memory {
    uint32_t count;
    struct {
        const struct tly_medium *medium;
        void *announced;
    } at[MOST];
};

int tly_memory_announce(const void *base, size_t bytes, struct tly_memory **out)
{
    struct tly_memory *m = NULL;
    for (const struct tly_medium *const *x = tly_media; *x; x++) {
        if (!(*x)->announce)
            continue;
        if (!m)
            m = calloc(1, sizeof *m);
        int err = m && m->count < MOST ? (*x)->announce(base, bytes, &m->at[m->count].announced) : -ENOMEM;
        if (err) {
            tly_memory_withdraw(m);
            return tly_fail(-err, "memory cannot be announced to %s", (*x)->scheme);
        }
        m->at[m->count++].medium = *x;
    }
    *out = m;
    return 0;
}

void tly_memory_withdraw(struct tly_memory *m)
{
    for (uint32_t i = 0; m && i < m->count; i++)
        m->at[i].medium->withdraw(m->at[i].announced);
    free(m);
}
