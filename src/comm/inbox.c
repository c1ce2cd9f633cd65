/* inbox.c - what other threads have for the loop: operations, stand-ins for the engine, and that the engine is broken.
 *
 * What stages say is there, too (chain.c). */
#include <stdio.h>

#include "base/list.h"
#include "comm/inbox.h"
#include "comm/op/op.h"

void tly_inbox_init(struct tly_inbox *i)
{
    pthread_mutex_init(&i->lock, NULL);
    tly_list_init(&i->ops);
    tly_list_init(&i->wanted);
}

void tly_inbox_finish(struct tly_inbox *i)
{
    pthread_mutex_destroy(&i->lock);
}

bool tly_inbox_is_empty(struct tly_inbox *i)
{
    tly_inbox_lock(i);
    bool empty = tly_list_empty(&i->ops);
    tly_inbox_unlock(i);
    return empty;
}

bool tly_inbox_has(struct tly_inbox *i, uint64_t key, uint32_t round)
{
    bool found = false;
    tly_inbox_lock(i);
    for (struct tly_list *n = i->ops.next; n != &i->ops && !found; n = n->next) {
        const struct tally_op *op = tly_list_entry(n, struct tally_op, node);
        found = op->key == key && op->round == round;
    }
    tly_inbox_unlock(i);
    return found;
}

void tly_inbox_want(struct tly_inbox *i, struct tly_list *wanted)
{
    tly_inbox_lock(i);
    tly_list_append(&i->wanted, wanted);
    tly_inbox_unlock(i);
}

void tly_inbox_want_again(struct tly_inbox *i, struct tly_list *all)
{
    tly_inbox_lock(i);
    while (!tly_list_empty(all))
        tly_list_append(&i->wanted, tly_list_take(all));
    tly_inbox_unlock(i);
}

struct tly_list *tly_inbox_wanted(struct tly_inbox *i)
{
    tly_inbox_lock(i);
    struct tly_list *n = tly_list_empty(&i->wanted) ? NULL : tly_list_take(&i->wanted);
    tly_inbox_unlock(i);
    return n;
}

void tly_inbox_break(struct tly_inbox *i, int err, const char *reason)
{
    tly_inbox_lock(i);
    if (!i->broken) {
        i->broken = err;
        snprintf(i->reason, sizeof i->reason, "%s", reason);
    }
    tly_inbox_unlock(i);
}

int tly_inbox_broken(struct tly_inbox *i, const char **reason)
{
    tly_inbox_lock(i);
    int err = i->broken;
    tly_inbox_unlock(i);
    *reason = i->reason;
    return err;
}
