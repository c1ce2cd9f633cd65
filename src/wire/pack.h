/* pack.h - little-endian numbers, and a bounded writer and reader for payloads of control frames. */
#ifndef TLY_PACK_H
#define TLY_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint8_t *tly_put16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    return p + 2;
}
static inline uint8_t *tly_put32(uint8_t *p, uint32_t v)
{
    return tly_put16(tly_put16(p, (uint16_t)v), (uint16_t)(v >> 16));
}
static inline uint8_t *tly_put64(uint8_t *p, uint64_t v)
{
    return tly_put32(tly_put32(p, (uint32_t)v), (uint32_t)(v >> 32));
}
static inline uint8_t *tly_put_double(uint8_t *p, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, 8);
    return tly_put64(p, bits);
}
static inline uint16_t tly_get16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}
static inline uint32_t tly_get32(const uint8_t *p)
{
    return tly_get16(p) | (uint32_t)tly_get16(p + 2) << 16;
}
static inline uint64_t tly_get64(const uint8_t *p)
{
    return tly_get32(p) | (uint64_t)tly_get32(p + 4) << 32;
}
static inline double tly_get_double(const uint8_t *p)
{
    uint64_t bits = tly_get64(p);
    double v;
    memcpy(&v, &bits, 8);
    return v;
}

/* Writes into a growing buffer; `failed` stays set once memory ran out. */
struct tly_writer {
    uint8_t *data; /* owned; free() */
    size_t len, room;
    bool failed;
};
void tly_write32(struct tly_writer *w, uint32_t v);
void tly_write64(struct tly_writer *w, uint64_t v);
/* Length (32 bits) and bytes; NULL is "". */
void tly_write_text(struct tly_writer *w, const char *text);

/* Reads from a buffer; `failed` stays set once it ended too early or a text was too long, and all that is
 * read from then on is 0 or "". */
struct tly_reader {
    const uint8_t *data; /* borrowed */
    size_t len;
    bool failed;
};
uint32_t tly_read32(struct tly_reader *r);
uint64_t tly_read64(struct tly_reader *r);
/* Into out[room], always terminated; control characters become '?'. */
void tly_read_text(struct tly_reader *r, char *out, size_t room);

#endif
