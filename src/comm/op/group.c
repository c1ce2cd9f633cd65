/* group.c - ranks that operate among themselves.
 *
 * A group has a name, which goes into its tensors' keys, so that ranks meet by name even where their lists differ; and
 * a list of ranks, which has a number on the wire.  A service learns the list once on each connection, before the
 * first part that carries the number (tly_group_tell).  Number 0 stands for all ranks.  Two ranks stand in the number
 * themselves (tly_pair).  Ranks whose lists differ meet by the group's name at one service, which tells them
 * (tly_round_widen). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/map.h"
#include "base/text.h"
#include "comm/comm.h"
#include "comm/op/carriers.h"
#include "comm/op/group.h"
#include "comm/path/peer.h"
#include "tally/tally.h"
#include "transport/outbox.h"
#include "wire/frame.h"
#include "wire/pack.h"

static void group_destroy(struct tally_group *g)
{
    tly_map_finish(&g->messages);
    if (g->number)
        tly_carriers_destroy(g->carriers);
    free(g->ranks);
    free(g->name);
    free(g);
}

static uint64_t group_hash_list(const uint32_t *ranks, int size)
{
    return XXH3_64bits_withSeed(ranks, (size_t)size * sizeof *ranks, 2);
}

int tly_group_begin(tally_comm *c)
{
    struct tally_group *g = tly_comm_all(c);
    g->comm = c;
    g->rank = c->rank;
    g->size = c->size;
    g->ranks = calloc((size_t)c->size, sizeof *g->ranks);
    if (!g->ranks)
        return tly_fail(ENOMEM, "out of memory");
    for (int i = 0; i < c->size; i++)
        g->ranks[i] = (uint32_t)i;
    g->list = group_hash_list(g->ranks, g->size);
    return 0;
}

void tly_group_finish(tally_comm *c)
{
    struct tly_groups *groups = tly_names_groups(&c->names);
    struct tally_group *g;
    tly_map_each(&groups->by_id, g) group_destroy(g);
    tly_map_finish(&groups->by_id);
    tly_map_finish(&groups->all.messages);
    tly_carriers_destroy(groups->all.carriers);
    free(groups->all.ranks);
    free(groups->lists);
}

static void group_count_anew(struct tally_group *g)
{
    memset(g->unnamed, 0, sizeof g->unnamed);
    memset(g->ordered, 0, sizeof g->ordered);
}

void tly_groups_begin_anew(struct tly_groups *groups)
{
    struct tally_group *g;
    group_count_anew(&groups->all);
    tly_map_each(&groups->by_id, g) group_count_anew(g);
}

static bool group_same_list(const struct tly_rank_list *a, const struct tly_rank_list *b)
{
    return a->size == b->size && memcmp(a->ranks, b->ranks, (size_t)a->size * sizeof *a->ranks) == 0;
}

static struct tly_rank_list group_list(const struct tally_group *g)
{
    return (struct tly_rank_list){g->ranks, g->size};
}

/* The number of a list, which is to stay; names.lock held, or nobody else there yet.  Equal lists have the same.  -ENOMEM. */
static int group_number(struct tly_groups *groups, const struct tly_rank_list *list, uint32_t *number)
{
    const struct tly_rank_list all = group_list(&groups->all);
    *number = 0;
    if (group_same_list(list, &all))
        return 0;
    for (uint32_t i = 0; i < groups->list_count; i++)
        if (group_same_list(list, &groups->lists[i])) {
            *number = i + 1;
            return 0;
        }
    struct tly_rank_list *more = realloc(groups->lists, (groups->list_count + 1) * sizeof *more);
    if (!more)
        return -ENOMEM;
    groups->lists = more;
    groups->lists[groups->list_count++] = *list;
    *number = groups->list_count;
    return 0;
}

/* Make the group's carriers, and number the lists that this rank is in.  -ENOMEM. */
static int group_make_carriers(tally_comm *c, struct tally_group *g)
{
    const struct tly_seats *seats = tly_teams_seats(&c->teams);
    struct tly_carriers *k = NULL;
    int err = seats ? tly_carriers_make(seats, g->ranks, g->size, (uint32_t)c->rank, &k) : 0;
    if (!k)
        return err;
    struct tly_groups *groups = tly_names_groups(&c->names);
    g->carriers = k;
    for (unsigned i = 0; i < (unsigned)k->lists && !err; i++) {
        const struct tly_rank_list list = {tly_carriers_list(k, i), k->machines};
        if (tly_carriers_have(k, i, (uint32_t)c->rank))
            err = group_number(groups, &list, &k->number[i]);
    }
    return err;
}

int tly_group_have_carriers(tally_comm *c)
{
    return group_make_carriers(c, tly_comm_all(c));
}

/* The group's number, and those of its carriers' lists.  -ENOMEM: nothing has changed. */
static int group_have_numbers(tally_comm *c, struct tally_group *g)
{
    struct tly_groups *groups = tly_names_groups(&c->names);
    const struct tly_rank_list list = group_list(g);
    uint32_t before = groups->list_count;
    int err = group_number(groups, &list, &g->number);
    if (!err && !g->number)
        g->carriers = groups->all.carriers;
    else if (!err)
        err = group_make_carriers(c, g);
    if (!err && tly_map_put(&groups->by_id, g->id, g) != 0)
        err = -ENOMEM;
    if (err)
        groups->list_count = before;
    return err;
}

/* If there are no seats but an engine, the job has one machine. */
static void group_find_neighbours(const tally_comm *c, struct tally_group *g)
{
    const struct tly_seats *seats = tly_teams_seats(&c->teams);
    uint32_t rank[TLY_LOCAL_RANKS], count = 0;
    for (int i = 0; i < g->size && c->local; i++) {
        const struct tly_seat seat =
            seats ? seats->rank[g->ranks[i]] : (struct tly_seat){(uint32_t)c->machine, g->ranks[i]};
        if (seat.machine == (uint32_t)c->machine)
            rank[count++] = seat.place;
    }
    tly_local_group_make(&g->here, rank, count, (uint32_t)c->local_rank);
}

uint32_t tly_group_place(const struct tally_group *g, uint32_t rank)
{
    uint32_t place = 0;
    while (g->ranks[place] != rank)
        place++;
    return place;
}

static int group_read_list(tally_comm *c, struct tally_group *g, const int ranks[])
{
    bool *named = calloc((size_t)c->size, sizeof *named);
    if (!named)
        return tly_fail(ENOMEM, "out of memory");
    int err = 0;
    g->rank = -1;
    for (int i = 0; i < g->size && !err; i++) {
        if (ranks[i] < 0 || ranks[i] >= c->size)
            err = tly_fail(EINVAL, "group '%.100s': %d is no rank from 0 to %d", g->name, ranks[i],
                           c->size - 1);
        else if (named[ranks[i]])
            err = tly_fail(EINVAL, "group '%.100s': rank %d is there twice: name each rank once", g->name,
                           ranks[i]);
        if (err)
            break;
        named[ranks[i]] = true;
        g->ranks[i] = (uint32_t)ranks[i];
        if (ranks[i] == c->rank)
            g->rank = i;
    }
    free(named);
    if (!err && g->rank < 0)
        err = tly_fail(EINVAL, "group '%.100s': rank %d is not in it: only its own ranks make a group",
                       g->name, c->rank);
    g->list = group_hash_list(g->ranks, g->size);
    if (!err)
        group_find_neighbours(c, g);
    return err;
}

int tally_group_create(tally_comm *comm, const char *name, const int ranks[], size_t count,
                       tally_group **group)
{
    int err = tly_comm_check(comm);
    if (err)
        return err;
    if (!name || !name[0] || !ranks || count < 1 || count > (size_t)comm->size)
        return tly_fail(EINVAL, "a group needs a name and 1 to %d ranks", comm->size);
    struct tally_group *g = calloc(1, sizeof *g);
    if (g) {
        g->comm = comm;
        g->name = strdup(name);
        g->id = XXH3_64bits_withSeed(name, strlen(name), 3) | 1;
        g->size = (int)count;
        g->ranks = calloc(count, sizeof *g->ranks);
    }
    if (!g || !g->name || !g->ranks)
        err = tly_fail(ENOMEM, "out of memory");
    if (!err)
        err = group_read_list(comm, g, ranks);
    struct tly_groups *groups = tly_names_groups(&comm->names);
    tly_names_lock(&comm->names);
    struct tally_group *known = err ? NULL : tly_map_get(&groups->by_id, g->id);
    if (known && strcmp(known->name, name) != 0)
        err = tly_fail(EEXIST, "the groups '%.80s' and '%.80s' have the same hash: rename one", known->name,
                       name);
    else if (known && known->list != g->list)
        err = tly_fail(EEXIST, "there is a group '%.100s' of other ranks already: use another name", name);
    else if (!err && !known && group_have_numbers(comm, g) != 0)
        err = tly_fail(ENOMEM, "out of memory");
    tly_names_unlock(&comm->names);
    if (g && (err || known))
        group_destroy(g);
    if (!err)
        *group = known ? known : g;
    return err;
}

int tally_group_rank(const tally_group *group)
{
    return group->rank;
}

int tally_group_size(const tally_group *group)
{
    return group->size;
}

void tly_group_text(const struct tally_group *g, char *out, size_t len)
{
    size_t at = 0;
    out[0] = '\0';
    for (int i = 0; i < g->size; i++) {
        int end = i;
        while (end + 1 < g->size && g->ranks[end + 1] == g->ranks[end] + 1)
            end++;
        at = tly_text_append_range(out, len, at, g->ranks[i], g->ranks[end]);
        i = end;
    }
}

/* In the loop.  All lists up to that number: which of them it needs does not matter. */
int tly_group_tell(struct tly_peer *p, uint32_t number)
{
    tally_comm *c = p->comm;
    while (p->told < number) {
        struct tly_frame f = {.type = TLY_GROUP, .group = p->told + 1, .rank = (uint32_t)c->rank};
        struct tly_writer w = {0};
        tly_names_lock(&c->names);
        const struct tly_rank_list list = tly_names_groups(&c->names)->lists[p->told];
        tly_names_unlock(&c->names);
        tly_write32(&w, (uint32_t)list.size);
        for (int i = 0; i < list.size; i++)
            tly_write32(&w, list.ranks[i]);
        int err = w.failed ? -ENOMEM : tly_outbox_post(&p->outbox, &f, w.data, w.len, NULL);
        free(w.data);
        if (err)
            return err;
        p->told++;
    }
    return 0;
}

int tly_group_tell_all(struct tly_peer *p)
{
    struct tly_names *names = &p->comm->names;
    tly_names_lock(names);
    uint32_t count = tly_names_groups(names)->list_count;
    tly_names_unlock(names);
    return tly_group_tell(p, count);
}
