/* outbox.c - a queue of control frames. */
#include "transport/outbox.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct letter {
    struct tly_list node;
    struct tly_frame frame;
    uint8_t *data; /* owned */
    void *tag;
};

void tly_outbox_init(struct tly_outbox *o)
{
    tly_list_init(&o->letters);
    o->bytes = 0;
    o->lost = false;
}

bool tly_outbox_full(const struct tly_outbox *o)
{
    return o->bytes > TLY_MOST_LETTER_BYTES;
}

int tly_outbox_post(struct tly_outbox *o, const struct tly_frame *f, const void *data, size_t len, void *tag)
{
    struct letter *l = calloc(1, sizeof *l);
    if (!l || (len && !(l->data = malloc(len)))) {
        free(l);
        tly_outbox_lose(o);
        return -ENOMEM;
    }
    if (len)
        memcpy(l->data, data, len);
    l->frame = *f;
    l->frame.payload = (uint32_t)len;
    l->tag = tag;
    tly_list_append(&o->letters, &l->node);
    o->bytes += sizeof *l + len;
    return 0;
}

void tly_outbox_lose(struct tly_outbox *o)
{
    o->lost = true;
}

bool tly_outbox_next(struct tly_outbox *o, struct tly_outgoing *out, void **tag)
{
    if (o->lost) {
        *out = (struct tly_outgoing){.lost = true};
        if (tag)
            *tag = NULL;
        return true;
    }
    if (tly_list_empty(&o->letters))
        return false;
    struct letter *l = tly_list_entry(tly_list_take(&o->letters), struct letter, node);
    o->bytes -= sizeof *l + l->frame.payload;
    *out = (struct tly_outgoing){.frame = l->frame, .payload = l->data, .owned = l->data};
    if (tag)
        *tag = l->tag;
    free(l);
    return true;
}

void tly_outbox_finish(struct tly_outbox *o, void (*drop)(void *user, void *tag), void *user)
{
    struct tly_outgoing out;
    void *tag;
    o->lost = false;
    while (tly_outbox_next(o, &out, &tag)) {
        free(out.owned);
        if (tag && drop)
            drop(user, tag);
    }
}
