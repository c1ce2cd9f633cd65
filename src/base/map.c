/* map.c - hash map from 64-bit keys to pointers. */
#include "base/map.h"

#include <errno.h>
#include <stdlib.h>

/* Keys are hashes, but some come from peers: mix, so that chosen low bits do not make one long run. */
static size_t map_home(const struct tly_map *m, uint64_t key)
{
    key ^= key >> 32;
    key *= 0x9e3779b97f4a7c15ull;
    return (size_t)(key >> 20) & (m->room - 1);
}

void tly_map_finish(struct tly_map *m)
{
    if (m)
        free(m->slots);
}

void *tly_map_get(const struct tly_map *m, uint64_t key)
{
    if (m->count == 0)
        return NULL;
    for (size_t i = map_home(m, key); m->slots[i].value; i = (i + 1) & (m->room - 1))
        if (m->slots[i].key == key)
            return m->slots[i].value;
    return NULL;
}

static int map_grow(struct tly_map *m)
{
    struct tly_map bigger = {.room = m->room ? m->room * 2 : 64};
    bigger.slots = calloc(bigger.room, sizeof *bigger.slots);
    if (!bigger.slots)
        return -ENOMEM;
    for (size_t i = 0; i < m->room; i++)
        if (m->slots[i].value)
            tly_map_put(&bigger, m->slots[i].key, m->slots[i].value);
    free(m->slots);
    *m = bigger;
    return 0;
}

int tly_map_put(struct tly_map *m, uint64_t key, void *value)
{
    if ((m->count + 1) * 2 > m->room) {
        int err = map_grow(m);
        if (err)
            return err;
    }
    size_t i = map_home(m, key);
    for (; m->slots[i].value; i = (i + 1) & (m->room - 1))
        if (m->slots[i].key == key) {
            m->slots[i].value = value;
            return 0;
        }
    m->slots[i] = (struct tly_map_slot){key, value};
    m->count++;
    return 0;
}

void *tly_map_take(struct tly_map *m, uint64_t key)
{
    if (m->count == 0)
        return NULL;
    size_t mask = m->room - 1, i = map_home(m, key);
    while (m->slots[i].value && m->slots[i].key != key)
        i = (i + 1) & mask;
    void *value = m->slots[i].value;
    if (!value)
        return NULL;
    m->count--;
    /* Close the gap with later ones whose home lies at or before it. */
    for (size_t j = (i + 1) & mask; m->slots[j].value; j = (j + 1) & mask)
        if (((j - map_home(m, m->slots[j].key)) & mask) >= ((j - i) & mask)) {
            m->slots[i] = m->slots[j];
            i = j;
        }
    m->slots[i].value = NULL;
    return value;
}
