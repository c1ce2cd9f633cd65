/* status.c - a coordinator's answer to `tally status`, as bytes; status_read.c reads it.
 *
 *   state, size, servers   32 each
 *   age_ms                 64
 *   members                32, then of each: role, rank, pid, port, stand (32 each), address, host (texts)
 *   why, who, what         32, texts: who holds the job up
 *   at, when, what         64, texts: the last change of the split
 *   has_roster             32; if 1: the roster
 *   epoch, count           32 each, then of each service what its card carries now, 64 */
#include "membership/status.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void tly_slow_write(struct tly_writer *w, const struct tly_slow *s)
{
    tly_write32(w, s->why);
    tly_write_text(w, s->who);
    tly_write_text(w, s->what);
}

int tly_slow_read(struct tly_reader *r, struct tly_slow *out)
{
    struct tly_slow s = {.why = tly_read32(r)};
    tly_read_text(r, s.who, sizeof s.who);
    tly_read_text(r, s.what, sizeof s.what);
    if (r->failed || s.why >= TLY_WHYS)
        return -EPROTO;
    *out = s;
    return 0;
}

void tly_slow_text(const struct tly_slow *s, char *out, size_t len)
{
    out[0] = '\0';
    if (s->why != TLY_WHY_NOBODY)
        snprintf(out, len, s->why == TLY_WHY_TURNS ? "%s: %s" : "%s, which %s", s->who, s->what);
}

const char *tly_slow_why(const struct tly_slow *s)
{
    static const char *const word[TLY_WHYS] = {"",          "card",           "processor", "computing",
                                               "all cards", "processor wait", "paging",    "by turns"};
    return s->why < TLY_WHYS ? word[s->why] : "";
}

void tly_change_write(struct tly_writer *w, const struct tly_change *c)
{
    tly_write64(w, c->at);
    tly_write_text(w, c->when);
    tly_write_text(w, c->what);
}

int tly_change_read(struct tly_reader *r, struct tly_change *out)
{
    struct tly_change c = {.at = tly_read64(r)};
    tly_read_text(r, c.when, sizeof c.when);
    tly_read_text(r, c.what, sizeof c.what);
    if (r->failed)
        return -EPROTO;
    *out = c;
    return 0;
}

void tly_currents_write(struct tly_writer *w, const struct tly_currents *c)
{
    tly_write32(w, c->epoch);
    tly_write32(w, c->count);
    for (uint32_t i = 0; i < c->count; i++)
        tly_write64(w, c->bandwidth[i]);
}

int tly_currents_read(struct tly_reader *r, struct tly_currents *out)
{
    struct tly_currents c = {.epoch = tly_read32(r)};
    c.count = tly_read32(r);
    if (r->failed || c.count > TLY_MAX_MACHINES || c.count > r->len / 8)
        return -EPROTO;
    c.bandwidth = c.count ? calloc(c.count, sizeof *c.bandwidth) : NULL;
    if (c.count && !c.bandwidth)
        return -ENOMEM;
    bool sane = true;
    for (uint32_t i = 0; i < c.count; i++) {
        c.bandwidth[i] = tly_read64(r);
        sane &= c.bandwidth[i] <= TLY_MAX_RATE;
    }
    if (r->failed || !sane) {
        tly_currents_finish(&c);
        return -EPROTO;
    }
    *out = c;
    return 0;
}

void tly_currents_finish(struct tly_currents *c)
{
    free(c->bandwidth);
    *c = (struct tly_currents){0};
}

uint64_t tly_current(const struct tly_currents *c, const struct tly_roster *r, uint32_t service)
{
    bool known = c->epoch == r->epoch && service < c->count && c->bandwidth[service];
    return known ? c->bandwidth[service] : r->services[service].bandwidth;
}

void tly_status_write(struct tly_writer *w, const struct tly_status *s)
{
    tly_write32(w, s->state);
    tly_write32(w, s->size);
    tly_write32(w, s->servers);
    tly_write64(w, s->age_ms);
    tly_write32(w, s->member_count);
    for (uint32_t i = 0; i < s->member_count; i++) {
        const struct tly_status_member *m = &s->members[i];
        tly_write32(w, m->role);
        tly_write32(w, m->rank);
        tly_write32(w, m->pid);
        tly_write32(w, m->stand);
        tly_endpoints_write(w, &m->at);
        tly_write_text(w, m->host);
    }
    tly_slow_write(w, &s->slow);
    tly_change_write(w, &s->changed);
    tly_write32(w, s->has_roster);
    if (s->has_roster)
        tly_roster_write(w, &s->roster);
    tly_currents_write(w, &s->current);
}
