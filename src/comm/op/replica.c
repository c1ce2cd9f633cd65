/* replica.c - memory of a shared tensor at a rank. */
#include "comm/op/replica.h"

#include <stdlib.h>

enum { ALIGN = 64 };

struct tly_replica *tly_replica_make(uint64_t count, uint64_t bytes, uint8_t dtype)
{
    struct tly_replica *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->count = count;
    r->dtype = dtype;
    for (int i = 0; i < 2; i++) {
        r->buffer[i] = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
        if (!r->buffer[i]) {
            tly_replica_destroy(r);
            return NULL;
        }
    }
    return r;
}

void tly_replica_destroy(struct tly_replica *r)
{
    if (!r)
        return;
    free(r->buffer[0]);
    free(r->buffer[1]);
    free(r->parts);
    free(r);
}

bool tly_replica_is_at(const struct tly_replica *r, uint32_t service)
{
    for (uint32_t i = 0; r && i < r->part_count; i++)
        if (r->parts[i].owner == service)
            return true;
    return false;
}
