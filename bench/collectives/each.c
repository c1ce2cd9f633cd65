/* each.c - see each.h. */
#include "each.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OFTEN_BYTES = 32 << 20, MOST_OFTEN = 8 };

static const char *const names[EACH_KINDS] = {"all-reduce", "reduce-scatter", "all-gather",
                                              "broadcast",  "all-to-all",     "reduce"};

struct job {
    const struct each_calls *calls;
    void *user;
    struct each each;
};

static void barrier(void *user)
{
    struct job *job = user;
    job->calls->barrier(job->user);
}

static void work(void *user, const struct rank *r)
{
    struct job *job = user;
    job->calls->perform(job->user, &job->each);
}

static void fill(void *user, const struct rank *r, int iteration)
{
    const struct each *e = &((struct job *)user)->each;
    size_t count = e->kind == ALL_GATHER ? e->piece : e->count;
    for (size_t i = 0; i < count; i++)
        e->in[i] = rank_input(e->rank, 0, i, iteration);
    if (e->out != e->in)
        memset(e->out, 0, e->count * sizeof *e->out);
}

/* What belongs at out[i]. */
static float right(const struct each *e, size_t i, int iteration)
{
    float ranks = (float)(e->of * (e->of - 1)) / 2;
    switch (e->kind) {
    case ALL_REDUCE:
    case REDUCE:
        return ranks + (float)e->of * rank_input(0, 0, i, iteration);
    case REDUCE_SCATTER:
        return ranks + (float)e->of * rank_input(0, 0, (size_t)e->rank * e->piece + i, iteration);
    case ALL_GATHER:
        return rank_input((int)(i / e->piece), 0, i % e->piece, iteration);
    case ALL_TO_ALL:
        return rank_input((int)(i / e->piece), 0, (size_t)e->rank * e->piece + i % e->piece, iteration);
    default:
        return rank_input(0, 0, i, iteration);
    }
}

static size_t count_wrong(void *user, const struct rank *r, int iteration)
{
    const struct each *e = &((struct job *)user)->each;
    size_t wrong = 0, count = e->kind == REDUCE_SCATTER      ? e->piece
                              : e->kind == REDUCE && e->rank ? 0
                                                             : e->count;
    for (size_t i = 0; i < count; i++)
        wrong += e->out[i] != right(e, i, iteration);
    return wrong;
}

static enum each_kind find(const char *name)
{
    for (int kind = 0; kind < EACH_KINDS; kind++)
        if (strcmp(name, names[kind]) == 0)
            return (enum each_kind)kind;
    fprintf(stderr, "collectives: there is no operation %s\n", name);
    exit(1);
}

int each_run(struct rank *r, const struct each_calls *calls, void *user, const char *report)
{
    static const struct rank_calls by_rank = {
        .barrier = barrier, .work = work, .fill = fill, .count_wrong = count_wrong};
    size_t wrong = 0;
    for (size_t i = 0; i < r->count; i++) {
        struct tensor *t = &r->tensors[i];
        struct job job = {.calls = calls, .user = user};
        job.each = (struct each){.kind = find(t->name),
                                 .rank = r->number,
                                 .of = r->of,
                                 .count = t->count,
                                 .piece = t->count / (size_t)r->of,
                                 .in = t->data};
        bool alone = job.each.kind == ALL_REDUCE || job.each.kind == BROADCAST;
        job.each.out = alone ? t->data : rank_allocate(t->count, sizeof(float));
        struct rank one = *r;
        size_t often = OFTEN_BYTES / (t->count * sizeof(float));
        one.iterations *= often < 1 ? 1 : often > MOST_OFTEN ? MOST_OFTEN : (int)often;
        one.tensors = t;
        one.count = 1;
        one.wrong = 0;
        one.busy = one.ticks = 0;
        one.sent = one.received = 0;
        one.seconds = rank_allocate((size_t)one.iterations, sizeof *one.seconds);
        one.cpu_seconds = rank_allocate((size_t)one.iterations, sizeof *one.cpu_seconds);
        rank_run(&one, &by_rank, &job);
        rank_print(&one, report);
        wrong += one.wrong;
        free(one.seconds);
        free(one.cpu_seconds);
        if (!alone)
            free(job.each.out);
        free(t->data); /* so that the machine need not have room for all of them at once */
        t->data = NULL;
    }
    free(r->tensors);
    free(r->seconds);
    free(r->cpu_seconds);
    return wrong != 0;
}
