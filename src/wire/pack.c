/* pack.c - bounded writing and reading of control payloads. */
#include "wire/pack.h"

#include <stdlib.h>

enum { USUAL = 256 }; /* bytes: most payloads are never moved */

static uint8_t *pack_extend(struct tly_writer *w, size_t more)
{
    if (w->failed)
        return NULL;
    if (w->len + more > w->room) {
        size_t room = (w->len + more) * 2;
        room = room < USUAL ? USUAL : room;
        uint8_t *data = realloc(w->data, room);
        if (!data) {
            w->failed = true;
            return NULL;
        }
        w->data = data;
        w->room = room;
    }
    w->len += more;
    return w->data + w->len - more;
}

void tly_write32(struct tly_writer *w, uint32_t v)
{
    uint8_t *p = pack_extend(w, 4);
    if (p)
        tly_put32(p, v);
}

void tly_write64(struct tly_writer *w, uint64_t v)
{
    uint8_t *p = pack_extend(w, 8);
    if (p)
        tly_put64(p, v);
}

void tly_write_text(struct tly_writer *w, const char *text)
{
    size_t n = text ? strlen(text) : 0;
    tly_write32(w, (uint32_t)n);
    uint8_t *p = pack_extend(w, n);
    if (p && n)
        memcpy(p, text, n);
}

static const uint8_t *pack_consume(struct tly_reader *r, size_t n)
{
    if (r->failed || n > r->len) {
        r->failed = true;
        return NULL;
    }
    r->data += n;
    r->len -= n;
    return r->data - n;
}

uint32_t tly_read32(struct tly_reader *r)
{
    const uint8_t *p = pack_consume(r, 4);
    return p ? tly_get32(p) : 0;
}

uint64_t tly_read64(struct tly_reader *r)
{
    const uint8_t *p = pack_consume(r, 8);
    return p ? tly_get64(p) : 0;
}

void tly_read_text(struct tly_reader *r, char *out, size_t room)
{
    uint32_t n = tly_read32(r);
    if (n >= room)
        r->failed = true;
    const uint8_t *p = pack_consume(r, n);
    out[0] = '\0';
    if (!p)
        return;
    for (uint32_t i = 0; i < n; i++) {
        bool second = i && p[i - 1] == 0xc2 && p[i] < 0xa0; /* of U+0080 to U+009F in UTF-8 */
        out[i] = p[i] >= 32 && p[i] != 127 && !second ? (char)p[i] : '?';
    }
    out[n] = '\0';
}
