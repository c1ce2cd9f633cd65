/* names.c - names in use: their keys, and the life of their tensors. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"
#include "base/map.h"
#include "comm/comm.h"
#include "comm/op/group.h"
#include "comm/op/names.h"
#include "comm/op/replica.h"
#include "comm/op/tensor.h"
#include "membership/roster.h"
#include "ops/call.h"
#include "tally/tally.h"

/* Do names of this kind keep their keys when all ranks have joined? */
static bool names_outlast_joins(unsigned kind)
{
    return kind && (tly_call_of(kind)->message || tly_call_of(kind)->kept);
}

/* 0 is the kind of all collectives in an ordered space. */
static bool names_is_message(unsigned kind)
{
    return kind && tly_call_of(kind)->message;
}

uint64_t tly_tensor_key(uint32_t joins, uint64_t group, uint32_t kind, uint32_t space, const char *name)
{
    /* Seeds that differ in all their bits: of up to three letters XXH3 mixes only the xor with the seed, and "t10" of
     * one kind would be "t11" of another. */
    uint64_t seed = (0x74616c6c79000000ull | (uint64_t)space << 8 | kind) * 0x9e3779b97f4a7c15ull;
    if (!names_outlast_joins(kind))
        seed ^= joins * 0xd6e8feb86659fd93ull;
    return XXH3_64bits_withSeed(name, strlen(name), seed ^ group);
}

struct tly_tensor *tly_tensor_get(tally_comm *c, const struct tally_group *g, uint32_t kind, uint32_t space,
                                  const char *name)
{
    uint64_t key = tly_tensor_key(tly_names_joins(&c->names), g->id, kind, space, name);
    struct tly_tensor *t = tly_names_find(&c->names, key);
    if (t && (t->group != g->id || t->kind != kind || t->space != space || strcmp(t->name, name) != 0)) {
        tly_fail(EINVAL, "the names '%s' and '%s' have the same hash: rename one", t->name, name);
        return NULL;
    }
    if (t)
        return t;
    size_t length = strlen(name);
    t = calloc(1, sizeof *t + length + 1);
    if (!t || tly_names_put(&c->names, key, t) != 0) {
        free(t);
        tly_fail(ENOMEM, "out of memory");
        return NULL;
    }
    memcpy(t->name, name, length);
    t->key = key;
    t->group = g->id;
    t->kind = (uint8_t)kind;
    t->space = (uint8_t)space;
    return t;
}

bool tly_tensor_is_message(const struct tly_tensor *t)
{
    return names_is_message(t->kind);
}

void tly_tensor_leave_plan(struct tly_tensor *t)
{
    if (t->plan_list && --t->plan_list->users == 0)
        free(t->plan_list);
    t->plan_list = NULL;
}

void tly_tensor_destroy(struct tly_tensor *t)
{
    if (!t)
        return;
    tly_tensor_leave_plan(t);
    free(t->cut.pieces);
    free(t->plan.pieces);
    tly_replica_destroy(t->replica);
    free(t);
}

void tly_names_init(struct tly_names *n)
{
    pthread_mutex_init(&n->lock, NULL);
}

void tly_names_finish(struct tly_names *n)
{
    struct tly_tensor *t;
    tly_map_each(&n->tensors, t) tly_tensor_destroy(t);
    tly_map_finish(&n->tensors);
    tly_map_finish(&n->former);
    pthread_mutex_destroy(&n->lock);
}

size_t tly_names_list(const struct tly_names *n, struct tly_begun *rounds)
{
    struct tly_tensor *t;
    size_t count = 0;
    tly_map_each(&n->tensors, t) if (t->round && !tly_tensor_is_message(t)) rounds[count++] =
        (struct tly_begun){t->key, t->round, 0};
    return count;
}

int tly_names_begin_anew(struct tly_names *n, uint32_t joins, bool former)
{
    struct tly_map tensors = {0};
    struct tly_tensor *t;
    int err = 0;
    n->joins = joins;
    tly_map_each(&n->tensors, t)
    {
        bool stays = t->unnamed || names_outlast_joins(t->kind);
        if (former && !stays && tly_map_put(&n->former, t->key, t) != 0)
            err = -ENOMEM;
        if (!stays) {
            t->key = tly_tensor_key(joins, t->group, t->kind, t->space, t->name);
            t->round = 0;
            free(t->cut.pieces); /* its home has moved */
            t->cut = (struct tly_cut){0};
        }
        if (tly_map_put(&tensors, t->key, t) != 0)
            err = -ENOMEM;
    }
    tly_map_finish(&n->tensors);
    n->tensors = tensors;
    n->plans = 0;
    tly_groups_begin_anew(&n->groups);
    return err;
}

void tly_names_take(struct tly_names *n, uint64_t key)
{
    pthread_mutex_lock(&n->lock);
    tly_map_take(&n->tensors, key);
    pthread_mutex_unlock(&n->lock);
}

void tly_names_close(struct tly_names *n)
{
    pthread_mutex_lock(&n->lock);
    n->closed = true;
    pthread_mutex_unlock(&n->lock);
}

void tly_names_text(struct tly_names *n, uint64_t key, char *out, size_t len)
{
    pthread_mutex_lock(&n->lock);
    const struct tly_tensor *t = tly_map_get(&n->tensors, key);
    t = t ? t : tly_map_get(&n->former, key);
    snprintf(out, len, "%s", t ? t->name : "unnamed"); /* those are forgotten with their operation */
    pthread_mutex_unlock(&n->lock);
}
