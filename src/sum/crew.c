/* crew.c - the threads that sum.
 *
 * Tasks wait in a list that all threads take from, and go into another once they have run.  The loop fetches that one
 * before it sleeps and calls each task's done().  The lock guards both lists; no task runs under it. */
#include "sum/crew.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/thread.h"
#include "topo/topo.h"

struct hand {
    struct tly_crew *crew;
    int home, index;
};

static void *crew_work(void *arg)
{
    struct hand me = *(struct hand *)arg;
    struct tly_crew *c = me.crew;
    free(arg);
    tly_topo_place(me.home, me.index);
    pthread_mutex_lock(&c->lock);
    while (!c->stop) {
        if (tly_list_empty(&c->todo)) {
            pthread_cond_wait(&c->more, &c->lock);
            continue;
        }
        struct tly_crew_task *t = tly_list_entry(c->todo.next, struct tly_crew_task, node);
        tly_list_remove(&t->node);
        c->running[me.index - 1] = t;
        pthread_mutex_unlock(&c->lock);
        t->work(t);
        pthread_mutex_lock(&c->lock);
        c->running[me.index - 1] = NULL;
        if (c->awaited)
            pthread_cond_broadcast(&c->ended);
        bool first = tly_list_empty(&c->finished);
        tly_list_append(&c->finished, &t->node);
        if (first) /* one wake-up fetches all that is finished by then */
            tly_loop_wake(c->loop);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static int64_t crew_fetch(struct tly_hook *h)
{
    struct tly_crew *c = tly_list_entry(h, struct tly_crew, hook);
    for (;;) {
        pthread_mutex_lock(&c->lock);
        struct tly_crew_task *t = NULL;
        if (!tly_list_empty(&c->finished)) {
            t = tly_list_entry(c->finished.next, struct tly_crew_task, node);
            tly_list_remove(&t->node);
        }
        pthread_mutex_unlock(&c->lock);
        if (!t)
            return INT64_MAX;
        t->done(t);
    }
}

int tly_crew_start(struct tly_crew *c, struct tly_loop *loop, int threads, int home)
{
    memset(c, 0, sizeof *c);
    c->loop = loop;
    tly_list_init(&c->todo);
    tly_list_init(&c->finished);
    tly_list_init(&c->hook.node);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->more, NULL);
    pthread_cond_init(&c->ended, NULL);
    c->thread = calloc((size_t)threads + 1, sizeof *c->thread);
    c->running = calloc((size_t)threads + 1, sizeof(struct tly_crew_task *));
    if (!c->thread || !c->running)
        return tly_fail(ENOMEM, "out of memory");
    c->hook.prepare = crew_fetch;
    tly_loop_hook(loop, &c->hook);
    for (int i = 0; i < threads; i++) {
        struct hand *h = malloc(sizeof *h);
        if (!h)
            return tly_fail(ENOMEM, "out of memory");
        *h = (struct hand){c, home, i + 1}; /* the loop's thread is number 0 */
        int err = tly_thread_start(&c->thread[i], "tally-crew", crew_work, h);
        if (err) {
            free(h);
            return err;
        }
        c->threads++;
    }
    return 0;
}

void tly_crew_stop(struct tly_crew *c)
{
    if (!c->loop)
        return;
    pthread_mutex_lock(&c->lock);
    c->stop = true;
    pthread_cond_broadcast(&c->more);
    pthread_mutex_unlock(&c->lock);
    for (int i = 0; i < c->threads; i++)
        pthread_join(c->thread[i], NULL);
    tly_loop_unhook(c->loop, &c->hook);
    pthread_cond_destroy(&c->more);
    pthread_cond_destroy(&c->ended);
    pthread_mutex_destroy(&c->lock);
    free(c->thread);
    free(c->running);
    c->loop = NULL;
}

static void crew_remove_those(struct tly_list *list,
                              bool (*is)(const struct tly_crew_task *t, const void *arg), const void *arg)
{
    for (struct tly_list *n = list->next, *next; n != list; n = next) {
        next = n->next;
        if (is(tly_list_entry(n, struct tly_crew_task, node), arg))
            tly_list_remove(n);
    }
}

static bool crew_runs(const struct tly_crew *c, bool (*is)(const struct tly_crew_task *t, const void *arg),
                      const void *arg)
{
    for (int i = 0; i < c->threads; i++)
        if (c->running[i] && is(c->running[i], arg))
            return true;
    return false;
}

void tly_crew_cancel(struct tly_crew *c, bool (*is)(const struct tly_crew_task *t, const void *arg),
                     const void *arg)
{
    if (!c->loop)
        return;
    pthread_mutex_lock(&c->lock);
    crew_remove_those(&c->todo, is, arg);
    c->awaited = true;
    while (crew_runs(c, is, arg))
        pthread_cond_wait(&c->ended, &c->lock);
    c->awaited = false;
    crew_remove_those(&c->finished, is, arg);
    pthread_mutex_unlock(&c->lock);
}

void tly_crew_post(struct tly_crew *c, struct tly_crew_task *t)
{
    pthread_mutex_lock(&c->lock);
    tly_list_append(&c->todo, &t->node);
    pthread_cond_signal(&c->more);
    pthread_mutex_unlock(&c->lock);
}
