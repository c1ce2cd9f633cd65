/* status_read.c - a coordinator's answer, read by `tally status` alone (status.c). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "membership/status.h"

enum { LEAST_MEMBER_BYTES = 7 * 4 };

void tly_status_finish(struct tly_status *s)
{
    if (!s)
        return;
    free(s->members);
    tly_currents_finish(&s->current);
    tly_roster_finish(&s->roster);
    memset(s, 0, sizeof *s);
}

static int status_read_member(struct tly_reader *r, const struct tly_status *s, struct tly_status_member *m)
{
    m->role = tly_read32(r);
    m->rank = tly_read32(r);
    m->pid = tly_read32(r);
    m->stand = tly_read32(r);
    int err = tly_endpoints_read(r, &m->at);
    tly_read_text(r, m->host, sizeof m->host);
    bool whole = m->role == TLY_ROLE_RANK     ? m->rank < s->size
                 : m->role == TLY_ROLE_TALLYD ? m->rank == TLY_NO_RANK
                                              : false;
    return err || r->failed || !whole || m->stand > TLY_STAND_LEFT ? -EPROTO : 0;
}

int tly_status_read(struct tly_reader *r, struct tly_status *out)
{
    struct tly_status s = {0};
    s.state = tly_read32(r);
    s.size = tly_read32(r);
    s.servers = tly_read32(r);
    s.age_ms = tly_read64(r);
    uint32_t count = tly_read32(r);
    if (r->failed || s.state > TLY_JOB_ENDED || s.size > TLY_MAX_RANKS || count > r->len / LEAST_MEMBER_BYTES)
        return -EPROTO;
    int err = 0;
    if (count) {
        s.members = calloc(count, sizeof *s.members);
        err = s.members ? 0 : -ENOMEM;
    }
    for (; !err && s.member_count < count; s.member_count++)
        err = status_read_member(r, &s, &s.members[s.member_count]);
    if (!err)
        err = tly_slow_read(r, &s.slow);
    if (!err)
        err = tly_change_read(r, &s.changed);
    uint32_t has_roster = tly_read32(r);
    if (!err && (r->failed || has_roster > 1))
        err = -EPROTO;
    if (!err && has_roster) {
        err = tly_roster_read(r, &s.roster);
        s.has_roster = !err;
        if (!err && s.roster.rank_count != s.size)
            err = -EPROTO;
    }
    if (!err)
        err = tly_currents_read(r, &s.current);
    if (err) {
        tly_status_finish(&s);
        return err;
    }
    *out = s;
    return 0;
}
