/* replica.c - memory of a shared tensor at a rank. */
#include "comm/op/replica.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64 };

struct tly_replica *tly_replica_make(uint64_t count, uint64_t bytes, uint8_t dtype)
{
    struct tly_replica *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    tly_list_init(&r->node);
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
    tly_list_remove(&r->node);
    for (uint32_t i = 0; i < r->part_count; i++) {
        free(r->parts[i].told);
        free(r->parts[i].coming);
    }
    free(r->parts);
    free(r);
}

void tly_replica_expect(struct tly_replica *r, uint32_t part, uint8_t *state)
{
    free(r->parts[part].coming);
    r->parts[part].coming = state;
}

void tly_replica_landed(struct tly_replica *r, uint32_t part)
{
    struct tly_replica_part *p = &r->parts[part];
    free(p->told);
    p->told = p->coming;
    p->coming = NULL;
    p->version = tly_version_get(p->told);
    p->held = !r->newest;
}

void tly_replica_settle(struct tly_replica *r, bool failed)
{
    const uint8_t *old = r->buffer[r->newest];
    uint8_t *young = r->buffer[!r->newest];
    bool any = !failed;
    for (uint32_t i = 0; i < r->part_count; i++) {
        tly_replica_expect(r, i, NULL);
        any |= r->parts[i].held != r->newest;
    }
    if (!any)
        return;
    r->newest = !r->newest;
    for (uint32_t i = 0; i < r->part_count; i++) {
        struct tly_replica_part *p = &r->parts[i];
        if (p->held != r->newest) /* what has landed of a failed operation is newer than the rest */
            memcpy(young + p->place, old + p->place, p->length);
        p->held = r->newest;
    }
}
