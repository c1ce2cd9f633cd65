/* tell.c - what the coordinator says to members, and how messages call them.
 *
 * Frames wait in each member's outbox until its link asks for them.  The job's end is a sentence that all members get; the
 * first one counts.  The rank of this process gets it last, since its program may end the process at once.  By then the
 * kernel has the others' sentences, except for a link that has no room just now: it sends its own when its peer reads, and
 * if this process ends before, that member learns only that the coordinator is gone. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "membership/internal.h"

void tly_coordinator_post(struct tly_coordinator_member *m, int type, uint16_t flags, const void *data,
                          size_t len)
{
    struct tly_frame f = {.type = (uint8_t)type, .flags = flags};
    if (m->link) /* out of memory: the connection ends, which the member notices */
        tly_outbox_post(&m->outbox, &f, data, len, NULL);
}

void tly_coordinator_post_verdict(struct tly_coordinator_member *m, int err, const char *sentence)
{
    struct tly_writer w = {0};
    tly_write32(&w, (uint32_t)err);
    tly_write_text(&w, sentence);
    if (!w.failed)
        tly_coordinator_post(m, TLY_VERDICT, 0, w.data, w.len);
    free(w.data);
}

void tly_coordinator_post_all(struct tly_coordinator *c, int type, const void *data, size_t len)
{
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (m->entered)
            tly_coordinator_post(m, type, 0, data, len);
    }
}

/* The rank in whose process this is; NULL: there is none, or it has not joined. */
static struct tly_coordinator_member *tell_beside(const struct tly_coordinator *c)
{
    return c->standalone || !c->ranks ? NULL : c->ranks[c->identity.rank];
}

void tly_coordinator_fail(struct tly_coordinator *c, int err, const char *format, ...)
{
    va_list args;
    const bool gathers = c->state == GATHERING;
    if (c->state == FAILED || c->state == ENDED)
        return;
    va_start(args, format);
    vsnprintf(c->verdict, sizeof c->verdict, format, args);
    va_end(args);
    c->state = FAILED;
    c->over_at = c->loop.awake;
    c->verdict_err = err;
    c->telling = true;
    const struct tly_coordinator_member *own = tell_beside(c);
    for (struct tly_list *n = c->members.next; n != &c->members; n = n->next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        if (!gathers && !m->entered && !m->watcher)
            continue; /* of the next start, or back in this job: it is told once it says which */
        if (!own || m != own)
            tly_coordinator_post_verdict(m, err, c->verdict);
    }
}

void tly_coordinator_tell_last(struct tly_coordinator *c)
{
    if (!c->telling)
        return;
    c->telling = false;
    for (struct tly_list *n = c->members.next, *next; n != &c->members; n = next) {
        struct tly_coordinator_member *m = tly_list_entry(n, struct tly_coordinator_member, node);
        next = n->next; /* a link that ends takes its member with it */
        if (m->link)
            tly_link_flush(m->link);
    }
    struct tly_coordinator_member *last = tell_beside(c);
    if (last) {
        tly_coordinator_post_verdict(last, c->verdict_err, c->verdict);
        tly_link_flush(last->link);
    }
}

void tly_coordinator_name(const struct tly_coordinator_member *m, char *out, size_t len)
{
    char address[TLY_HOST_TEXT];
    uint32_t port = tly_endpoints_host(&m->info.at, address);
    if (m->info.role == TLY_ROLE_TALLYD)
        snprintf(out, len, "tallyd on %s (%s port %u)", m->info.host, address, port);
    else
        snprintf(out, len, m->info.host[0] ? "rank %u on %s" : "rank %u", m->info.rank, m->info.host);
}

void tly_coordinator_await(struct tly_coordinator *c, uint32_t size)
{
    c->size = size;
    c->waiting_since = c->asked_missing = c->loop.awake;
}
