/* copies.c - copies.h. */
#include "device/copies.h"

/* An input of n bytes in copies of p bytes takes the bus n / p times the pause between two copies longer than one copy would, and
 * its first results come after p bytes.  The sum of both is least where p * p is n times the bytes that the bus moves in a pause:
 * some 2 us, at 25 to 50 GB/s. */
enum { PAUSE = 64 << 10, STEP = 64 << 10 };

uint64_t tly_copies_bytes(uint64_t input)
{
    uint64_t bytes = STEP;
    while (bytes * bytes / PAUSE < input)
        bytes += STEP;
    return bytes;
}

void tly_copies_init(struct tly_copies_lane *lane)
{
    tly_list_init(&lane->operations);
    lane->under_way = 0;
}

void tly_copies_landed(struct tly_copies_lane *lane, struct tly_copies *c, uint32_t part)
{
    c->part[part].waits = true;
    if (c->waiting++ == 0)
        tly_list_append(&lane->operations, &c->node);
}

/* Take the first results that wait, as far as they are neighbours, until the copy is long enough. */
static void copies_take(struct tly_copies *c, struct tly_copies_run *run)
{
    uint32_t i = 0;
    while (!c->part[i].waits)
        i++;
    *run = (struct tly_copies_run){.of = c, .first = i, .at = c->part[i].at};
    for (; i < c->parts && c->part[i].waits && c->part[i].at == run->at + run->bytes && run->bytes < c->most;
         i++) {
        c->part[i].waits = false;
        run->bytes += c->part[i].bytes;
        run->count++;
    }
    c->waiting -= run->count;
}

bool tly_copies_next(struct tly_copies_lane *lane, struct tly_copies_run *out)
{
    if (tly_list_empty(&lane->operations) || lane->under_way == TLY_COPIES_MOST)
        return false;
    struct tly_copies *c = tly_list_entry(lane->operations.next, struct tly_copies, node);
    copies_take(c, out);
    if (!c->waiting)
        tly_list_remove(&c->node);
    lane->under_way++;
    return true;
}

void tly_copies_end(struct tly_copies_lane *lane)
{
    lane->under_way--;
}

void tly_copies_drop(struct tly_copies *c)
{
    for (uint32_t i = 0; i < c->parts; i++)
        c->part[i].waits = false;
    c->waiting = 0;
    tly_list_remove(&c->node);
}
