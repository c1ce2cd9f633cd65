/* move.c - finds registered memory, and moves bytes from one process's to another's. */
#include <errno.h>
#include <stdio.h>
#include <sys/uio.h>

#include "test/rdma/fake_card/card.h"

enum { CHUNK = 128 << 10 }; /* stays in the cache between the two copies */

static const struct card_mr *move_mr(const struct card_client *c, uint32_t key)
{
    const struct card_mr *m = c->mrs;
    while (m && m->key != key)
        m = m->next;
    return m;
}

static bool move_holds(const struct card_mr *m, uint32_t pd, uint64_t at, uint64_t bytes, int access)
{
    return m && m->pd == pd && (m->access & access) == access && at >= m->at && bytes <= m->bytes &&
           at - m->at <= m->bytes - bytes;
}

bool card_find(const struct card_qp *q, const struct fake_slot *s, int access, struct card_extent *out)
{
    *out = (struct card_extent){.client = q->client, .count = s->sges};
    if (s->flags & TLY_IBV_SEND_INLINE) {
        out->client = NULL;
        out->bytes = s->bytes;
        out->length = s->inline_bytes;
        return true;
    }
    for (uint32_t i = 0; i < s->sges; i++) {
        const struct tly_ibv_sge *e = &s->sge[i];
        if (e->length && !move_holds(move_mr(q->client, e->lkey), q->pd, e->addr, e->length, access))
            return false;
        if (e->length > FAKE_MOST_MESSAGE) /* the sum cannot overflow */
            return false;
        out->sge[i] = *e;
        out->length += e->length;
    }
    return true;
}

bool card_find_remote(const struct card_qp *q, uint64_t at, uint64_t bytes, uint32_t key,
                      struct card_extent *out)
{
    *out = (struct card_extent){.client = q->client, .count = 1, .length = (uint32_t)bytes};
    out->sge[0] = (struct tly_ibv_sge){.addr = at, .length = (uint32_t)bytes, .lkey = key};
    return (q->attr.qp_access_flags & TLY_IBV_ACCESS_REMOTE_WRITE) &&
           (!bytes || move_holds(move_mr(q->client, key), q->pd, at, bytes, TLY_IBV_ACCESS_REMOTE_WRITE));
}

/* The parts of an extent that have these bytes. */
static uint32_t move_parts(const struct card_extent *e, uint32_t skip, uint32_t bytes,
                           struct iovec out[FAKE_SGES])
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < e->count && bytes; i++) {
        uint32_t length = e->sge[i].length;
        if (skip >= length) {
            skip -= length;
            continue;
        }
        uint32_t take = length - skip < bytes ? length - skip : bytes;
        out[n++] = (struct iovec){(void *)(uintptr_t)(e->sge[i].addr + skip), take};
        bytes -= take;
        skip = 0;
    }
    return n;
}

static bool move_read(const struct card_extent *e, uint32_t skip, uint8_t *to, uint32_t bytes)
{
    struct iovec from[FAKE_SGES], local = {to, bytes};
    if (!e->client) {
        memcpy(to, e->bytes + skip, bytes);
        return true;
    }
    return process_vm_readv(e->client->pid, &local, 1, from, move_parts(e, skip, bytes, from), 0) == bytes;
}

/* The pages of a process that has died stay pinned while a child has its descriptors: the write lands, and nobody sees it. */
static bool move_write(const struct card_extent *e, uint32_t skip, uint8_t *from, uint32_t bytes)
{
    struct iovec to[FAKE_SGES], local = {from, bytes};
    errno = 0; /* a write that falls short sets none */
    return process_vm_writev(e->client->pid, &local, 1, to, move_parts(e, skip, bytes, to), 0) == bytes ||
           errno == ESRCH;
}

int card_move(const struct card_extent *from, uint32_t skip_from, const struct card_extent *to,
              uint32_t skip_to, uint32_t bytes)
{
    static uint8_t between[CHUNK];
    for (uint32_t at = 0; at < bytes; at += CHUNK) {
        uint32_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        if (!move_read(from, skip_from + at, between, n)) {
            fprintf(stderr, "memory of process %d that is registered cannot be read: %s\n",
                    (int)from->client->pid, strerror(errno));
            return TLY_IBV_WC_LOC_PROT_ERR;
        }
        if (!move_write(to, skip_to + at, between, n)) {
            fprintf(stderr, "memory of process %d that is registered cannot be written: %s\n",
                    (int)to->client->pid, strerror(errno));
            return TLY_IBV_WC_REM_OP_ERR;
        }
    }
    return TLY_IBV_WC_SUCCESS;
}
