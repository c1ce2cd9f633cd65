/* members.c - the ranks that take part in a round: all ranks, a group's list that a rank has sent on its connection, or
 * two ranks alone.
 *
 * Equal lists are one object, whichever rank sent them, so rounds compare them by address.  Each list carries the trees of
 * its sums.  Lists live as long as the job; a group's number holds on the connection over which its list came. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "base/map.h"
#include "membership/roster.h"
#include "sum/internal.h"
#include "sum/members.h"
#include "sum/session.h"
#include "sum/slot.h"
#include "wire/pack.h"

/* How much one rank may have the service remember: numbers of groups on one connection; and, for as long as the job lives,
 * lists that no other rank told first, and the ranks in them.  A rank may tell 8,192 groups of its own, and for each of them a
 * list of carriers. */
enum { MOST_GROUPS = 1 << 16, MOST_LISTS = 1 << 14, MOST_NAMED = 1 << 20 };

bool tly_members_have(const struct tly_members *m, uint32_t rank)
{
    for (uint32_t i = 0; i < m->count; i++)
        if (m->rank[i] == rank)
            return true;
    return false;
}

static void members_destroy(struct tly_members *m)
{
    for (int i = 0; i < 2; i++) {
        free(m->tree[i].group_size);
        free(m->tree[i].order);
    }
    free(m->rank);
    free(m);
}

/* Its machines' ranks, or 0 if two of the list share a machine: a rank may have sent any list.  -ENOMEM. */
static int members_count_carried(const struct tly_job *job, struct tly_members *m)
{
    bool *here = calloc(job->machines, sizeof *here);
    bool twice = false;
    for (uint32_t i = 0; here && i < m->count && !twice; i++) {
        uint32_t machine = job->machine[m->rank[i]];
        twice = here[machine];
        here[machine] = true;
        m->carried += (uint32_t)job->machine_ranks[machine];
    }
    m->carried = twice ? 0 : m->carried;
    free(here);
    return here ? 0 : -ENOMEM;
}

static bool members_are_nodes(const struct tly_job *job, const struct tly_members *m)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < m->count && m->carried; i++) {
        uint32_t end = at + (uint32_t)job->machine_ranks[job->machine[m->rank[i]]];
        if (!tly_roster_is_node(0, m->carried, at, end))
            return false;
        at = end;
    }
    return m->carried > 0;
}

static uint64_t members_hash_list(const uint32_t *rank, uint32_t count)
{
    uint64_t h = tly_map_mix(count);
    for (uint32_t i = 0; i < count; i++)
        h = tly_map_mix(h + rank[i]);
    return h;
}

/* NULL: no rank has told this list. */
static struct tly_members *members_find(const struct tly_job *job, const uint32_t *rank, uint32_t count)
{
    struct tly_members *m = tly_map_get(&job->by_list, members_hash_list(rank, count));
    while (m && (m->count != count || memcmp(m->rank, rank, count * sizeof *rank) != 0))
        m = m->alike;
    return m;
}

static struct tly_members *members_make(struct tly_job *job, const uint32_t *rank, uint32_t count)
{
    struct tly_members *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->rank = malloc(count * sizeof *m->rank);
    m->count = count;
    for (int i = 0; i < 2; i++) {
        m->tree[i].group_size = calloc(count, sizeof *m->tree[i].group_size);
        m->tree[i].order = calloc(count, sizeof *m->tree[i].order);
    }
    if (!m->rank || !m->tree[0].group_size || !m->tree[0].order || !m->tree[1].group_size ||
        !m->tree[1].order) {
        members_destroy(m);
        return NULL;
    }
    memcpy(m->rank, rank, count * sizeof *rank);
    if (members_count_carried(job, m) != 0) {
        members_destroy(m);
        return NULL;
    }
    m->nodes = members_are_nodes(job, m);
    /* One balanced tree in the group's order: a rank is numbered by its place among the contributors. */
    for (int i = 0; i < 2; i++) {
        m->tree[i].groups = 1;
        m->tree[i].group_size[0] = (int)count;
        memcpy(m->tree[i].order, rank, count * sizeof *rank);
    }
    uint64_t hash = members_hash_list(rank, count);
    m->alike = tly_map_get(&job->by_list, hash);
    if (tly_map_put(&job->by_list, hash, m) != 0) {
        members_destroy(m);
        return NULL;
    }
    tly_list_append(&job->lists, &m->node);
    return m;
}

/* `maker`: the burden that is charged for the list if no rank has told it before; NULL: two ranks alone, which are few.
 * NULL with errno: ENOMEM; EPROTO: too many lists. */
static struct tly_members *members_find_or_make(struct tly_job *job, const uint32_t *rank, uint32_t count,
                                                struct tly_burden *maker)
{
    struct tly_members *m = members_find(job, rank, count);
    if (m)
        return m;
    errno = EPROTO;
    if (maker && (maker->lists >= MOST_LISTS || maker->named + count > MOST_NAMED))
        return NULL;
    m = members_make(job, rank, count);
    errno = ENOMEM;
    if (m && maker) {
        maker->lists++;
        maker->named += count;
    }
    return m;
}

static uint64_t members_hash(uint32_t number)
{
    return (number + 1ull) * 0x9e3779b97f4a7c15ull;
}

const struct tly_members *tly_members_of(struct tly_session *p, uint32_t group)
{
    struct tly_job *job = p->job;
    if (!(group & TLY_PAIR))
        return group ? tly_map_get(&p->groups, members_hash(group)) : job->all;
    const uint32_t rank[2] = {tly_pair_from(group), tly_pair_to(group)};
    if ((rank[0] != p->rank && rank[1] != p->rank) || rank[0] >= job->ranks || rank[1] >= job->ranks)
        return NULL;
    struct tly_members *m = tly_map_get(&job->pairs, members_hash(group));
    if (!m) {
        m = members_find_or_make(job, rank, rank[0] == rank[1] ? 1 : 2, NULL);
        if (m && tly_map_put(&job->pairs, members_hash(group), m) != 0)
            return NULL;
    }
    return m;
}

int tly_members_learn(struct tly_session *p, const struct tly_frame *f, const void *data, const char **why)
{
    struct tly_job *job = p->job;
    struct tly_reader r = {data, f->payload, false};
    uint32_t count = tly_read32(&r);
    *why = "a malformed list of ranks";
    if (!f->group || f->group & TLY_PAIR || !count || count > job->ranks || p->groups.count >= MOST_GROUPS ||
        tly_map_get(&p->groups, members_hash(f->group)))
        return -EPROTO;
    uint32_t *rank = malloc(count * sizeof *rank);
    bool *named = calloc(job->ranks, sizeof *named);
    int err = rank && named ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < count && !err; i++) {
        rank[i] = tly_read32(&r);
        if (r.failed || rank[i] >= job->ranks || named[rank[i]])
            err = -EPROTO;
        else
            named[rank[i]] = true;
    }
    if (!err && !named[p->rank])
        err = -EPROTO;
    struct tly_members *m = err ? NULL : members_find_or_make(job, rank, count, &job->burden[p->rank]);
    if (!err && !m) {
        err = -errno;
        *why = err == -EPROTO ? "more groups than a rank may have" : "out of memory";
    }
    if (!err && tly_map_put(&p->groups, members_hash(f->group), m) != 0)
        err = -ENOMEM;
    free(rank);
    free(named);
    return err;
}

const struct tly_members *tly_members_unite(struct tly_session *p, const struct tly_members *a,
                                            const struct tly_members *b)
{
    struct tly_job *job = p->job;
    uint32_t *rank = malloc((a->count + (size_t)b->count) * sizeof *rank), count = 0;
    if (!rank)
        return NULL;
    for (uint32_t i = 0; i < job->ranks; i++)
        if (tly_members_have(a, i) || tly_members_have(b, i))
            rank[count++] = i;
    const struct tly_members *m = members_find_or_make(job, rank, count, &job->burden[p->rank]);
    free(rank);
    return m;
}

/* All ranks in their order.  A group of all ranks in that order is the same list, and so are its sums' trees: those
 * of the roster, which may go by machines. */
int tly_members_begin(struct tly_job *job, const struct tly_roster *roster)
{
    uint32_t *rank = malloc(roster->rank_count * sizeof *rank);
    if (!rank)
        return -ENOMEM;
    for (uint32_t i = 0; i < roster->rank_count; i++)
        rank[i] = i;
    job->all = members_make(job, rank, roster->rank_count);
    free(rank);
    if (!job->all)
        return -ENOMEM;
    for (int i = 0; i < 2; i++) {
        struct tly_member_tree *t = &job->all->tree[i];
        tly_roster_tree(roster, i == 1, &t->groups, t->group_size, t->order);
    }
    return 0;
}

void tly_members_finish(struct tly_job *job)
{
    while (!tly_list_empty(&job->lists))
        members_destroy(tly_list_entry(tly_list_take(&job->lists), struct tly_members, node));
    tly_map_finish(&job->by_list);
    tly_map_finish(&job->pairs);
}
