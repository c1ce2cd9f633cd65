/* map.h - hash map from a 64-bit key that is a good hash already to a pointer.  Open addressing, linear
 * probing, deletion by shifting back. */
#ifndef TLY_MAP_H
#define TLY_MAP_H

#include <stddef.h>
#include <stdint.h>

struct tly_map_slot {
    uint64_t key;
    void *value; /* NULL: free */
};

struct tly_map {
    struct tly_map_slot *slots; /* owned; a power of two of them */
    size_t count, room;
};

void tly_map_finish(struct tly_map *m);
void *tly_map_get(const struct tly_map *m, uint64_t key);
/* Set key's value (not NULL), replacing an old one.  -ENOMEM. */
int tly_map_put(struct tly_map *m, uint64_t key, void *value);
/* Take key's value out, or NULL. */
void *tly_map_take(struct tly_map *m, uint64_t key);

/* Spread the bits of a number that is to become a key, or part of one (MurmurHash3's last step). */
static inline uint64_t tly_map_mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

/* for each value; the body must not put or take. */
#define tly_map_each(m, v) \
    for (size_t i_##v = 0; i_##v < (m)->room; i_##v++) \
        if (((v) = (m)->slots[i_##v].value) != NULL)

#endif
