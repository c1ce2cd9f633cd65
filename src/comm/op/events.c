/* events.c - the completion queue: ended operations and log lines, for one or more waiting threads. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/log.h"
#include "comm/comm.h"
#include "comm/op/events.h"
#include "comm/op/handle.h"
#include "comm/op/op.h"
#include "tally/tally.h"

enum { MOST_LOGS = 1000 };

struct log_line {
    struct tly_list node;
    int level;
    char text[1024];
};

/* The log's sink while somebody watches. */
static void events_take_line(void *user, enum tally_log_level level, const char *text)
{
    tally_comm *c = user;
    pthread_mutex_lock(&c->events.lock);
    struct log_line *line = c->events.log_count < MOST_LOGS ? malloc(sizeof *line) : NULL;
    if (line) {
        line->level = level;
        snprintf(line->text, sizeof line->text, "%s", text);
        tly_list_append(&c->events.logs, &line->node);
        c->events.log_count++;
        pthread_cond_signal(&c->events.more);
    }
    pthread_mutex_unlock(&c->events.lock);
}

void tly_events_init(tally_comm *c)
{
    pthread_condattr_t attr;
    pthread_mutex_init(&c->events.lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->events.more, &attr);
    pthread_condattr_destroy(&attr);
    tly_list_init(&c->events.ended);
    tly_list_init(&c->events.logs);
    tly_log_diversion_init(&c->events.diversion, events_take_line, c);
}

int tally_comm_watch_log(tally_comm *c, int on)
{
    int err = tly_comm_check(c);
    if (err == -ECHILD)
        return err;
    if (on)
        tly_log_divert(&c->events.diversion);
    else
        tly_log_end_diversion(&c->events.diversion);
    pthread_mutex_lock(&c->events.lock);
    c->events.log_ended = c->events.watching && !on;
    c->events.watching = on;
    pthread_cond_broadcast(&c->events.more);
    pthread_mutex_unlock(&c->events.lock);
    return 0;
}

/* No more events will come: wake all who wait. */
void tly_events_close(tally_comm *c)
{
    tly_log_end_diversion(&c->events.diversion);
    pthread_mutex_lock(&c->events.lock);
    c->events.closed = true;
    pthread_cond_broadcast(&c->events.more);
    /* All threads must have left before the communicator is freed. */
    while (c->events.waiting)
        pthread_cond_wait(&c->events.more, &c->events.lock);
    pthread_mutex_unlock(&c->events.lock);
}

void tly_events_finish(tally_comm *c)
{
    while (!tly_list_empty(&c->events.ended)) {
        struct tally_op *op = tly_list_entry(c->events.ended.next, struct tally_op, completion.node);
        tly_list_remove(&op->completion.node);
        tly_op_unref(op);
    }
    while (!tly_list_empty(&c->events.logs))
        free(tly_list_entry(tly_list_take(&c->events.logs), struct log_line, node));
    pthread_cond_destroy(&c->events.more);
    pthread_mutex_destroy(&c->events.lock);
}

static void events_announce(tally_comm *c, struct tally_op *op)
{
    pthread_mutex_lock(&c->events.lock);
    tly_list_append(&c->events.ended, &op->completion.node);
    pthread_cond_signal(&c->events.more);
    pthread_mutex_unlock(&c->events.lock);
}

void tly_op_set_done(struct tally_op *op)
{
    tly_handle_end(&op->handle);
    /* Pairs with tally_op_watch(), all of it seq_cst: one of the two sees what the other has written. */
    if (atomic_load(&op->completion.wanted) && !atomic_exchange(&op->completion.announced, true))
        events_announce(op->comm, op);
}

int tally_op_watch(tally_op *op)
{
    int err = tly_handle_check_fork(&op->handle);
    if (err)
        return err;
    tly_handle_hold(&op->handle); /* the completion queue's */
    if (atomic_exchange(&op->completion.wanted, true)) {
        tly_op_unref(op);
        return tly_fail(EINVAL, "the operation's end was asked for before: one event comes");
    }
    if (!tly_handle_is_done(&op->handle) || atomic_exchange(&op->completion.announced, true))
        return 0;
    tly_op_unref(op);
    return 1;
}

/* The oldest event into *e; the lock is held. */
static bool events_take(tally_comm *c, struct tally_event *e)
{
    if (!tly_list_empty(&c->events.logs)) {
        struct log_line *line = tly_list_entry(c->events.logs.next, struct log_line, node);
        tly_list_remove(&line->node);
        c->events.log_count--;
        e->kind = TALLY_EVENT_LOG;
        e->status = line->level;
        memcpy(e->text, line->text, sizeof e->text);
        free(line);
        return true;
    }
    if (!tly_list_empty(&c->events.ended)) {
        struct tally_op *op = tly_list_entry(c->events.ended.next, struct tally_op, completion.node);
        tly_list_remove(&op->completion.node);
        e->kind = TALLY_EVENT_OP;
        e->status = tly_handle_status(&op->handle);
        e->op = op;
        e->tag = op->completion.tag;
        snprintf(e->text, sizeof e->text, "%s", tly_handle_sentence(&op->handle));
        tly_op_unref(op);
        return true;
    }
    if (c->events.log_ended) {
        c->events.log_ended = false;
        e->kind = TALLY_EVENT_LOG_END;
        return true;
    }
    if (c->events.closed) {
        e->kind = TALLY_EVENT_CLOSE;
        return true;
    }
    return false;
}

int tally_comm_next(tally_comm *c, int timeout_ms, struct tally_event *event)
{
    int err = tly_comm_check_fork(c);
    if (err)
        return err;
    int64_t deadline = tly_now() + (timeout_ms < 0 ? 0 : timeout_ms * TLY_MS);
    struct timespec until = tly_clock_time(deadline);
    struct tally_event e = {0};
    pthread_mutex_lock(&c->events.lock);
    c->events.waiting++;
    while (!events_take(c, &e) && !err)
        err = timeout_ms < 0 ? pthread_cond_wait(&c->events.more, &c->events.lock)
                             : pthread_cond_timedwait(&c->events.more, &c->events.lock, &until);
    if (--c->events.waiting == 0 && c->events.closed)
        pthread_cond_broadcast(&c->events.more);
    pthread_mutex_unlock(&c->events.lock);
    if (!e.kind)
        return -ETIMEDOUT;
    *event = e;
    return 0;
}
