/* frame.c - fuzzes the header's decoder: whatever bytes come, behind whatever frame, a frame that it accepts keeps the
 * limits of wire/frame.h and encodes to the bytes that it came from. */
#include "wire/frame.h"

#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "wire/pack.h"

enum { at_check = 56, at_reserved = TLY_FRAME_LEAST + 31 };

/* A header, its context and that of the frame before it. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t key[TLY_FRAME_KEY_BYTES] = {1, 2, 3};
    uint8_t in[TLY_FRAME_BYTES + TLY_FRAME_LEAST] = {0}, out[TLY_FRAME_BYTES];
    memcpy(in, data, size < sizeof in ? size : sizeof in);
    uint32_t seq = tly_get32(in + 8);
    struct tly_context before, last;
    struct tly_frame f, g;
    const char *why = NULL;
    memcpy(before.bytes, in + TLY_FRAME_BYTES, sizeof before.bytes);

    /* As it came: the check holds back nearly all. */
    last = before;
    if (tly_frame_decode(in, key, seq, &last, &f, &why) != 0)
        require(why != NULL && memcmp(&last, &before, sizeof last) == 0);

    /* As a peer that knows the key would send it. */
    bool same = tly_frame_size(in) == TLY_FRAME_LEAST;
    uint8_t *context = in + TLY_FRAME_LEAST, check[8];
    if (same)
        memcpy(context, before.bytes, sizeof before.bytes);
    memset(in + at_check, 0, sizeof check);
    crypto_shorthash(check, in, TLY_FRAME_BYTES, key);
    memcpy(in + at_check, check, sizeof check);
    why = NULL;
    last = before;
    int err = tly_frame_decode(in, key, seq, &last, &f, &why);
    if (err) {
        require(err == -EPROTO && why != NULL && memcmp(&last, &before, sizeof last) == 0);
        return 0;
    }
    require(memcmp(last.bytes, context, sizeof last.bytes) == 0);
    require(f.type > 0 && f.type < TLY_FRAME_TYPES && !(f.flags & TLY_SAME));
    require(f.payload <= TLY_MAX_CONTROL && f.length <= TLY_MAX_PART && f.rank < TLY_MAX_RANKS);
    require(tly_frame_decode(in, key, seq + 1, &last, &g, &why) == -EPROTO);
    if (in[at_reserved])
        return 0;
    /* Behind a frame of the same context, and behind one of another. */
    require(tly_frame_encode(&f, key, &last, out) == TLY_FRAME_LEAST);
    require(!same || memcmp(in, out, TLY_FRAME_LEAST) == 0);
    tly_context_init(&last);
    require(tly_frame_encode(&f, key, &last, out) == TLY_FRAME_BYTES);
    require(same || memcmp(in, out, TLY_FRAME_BYTES) == 0);
    return 0;
}
