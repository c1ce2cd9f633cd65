/* frame.c - fuzzes the header's decoder: whatever bytes come, a frame that it accepts keeps the limits of
 * wire/frame.h and encodes to the bytes that it came from. */
#include "wire/frame.h"

#include <errno.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "wire/pack.h"

/* The reserved byte, which the encoder writes as 0. */
enum { at_reserved = 43 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t key[TLY_FRAME_KEY_BYTES] = {1, 2, 3};
    uint8_t in[TLY_FRAME_BYTES] = {0}, out[TLY_FRAME_BYTES];
    memcpy(in, data, size < sizeof in ? size : sizeof in);
    uint32_t seq = tly_get32(in + 8);
    struct tly_frame f;
    const char *why = NULL;

    /* As it came: the check holds back nearly all. */
    if (tly_frame_decode(in, key, seq, &f, &why) != 0)
        require(why != NULL);

    /* As a peer that knows the key would send it. */
    crypto_shorthash(in + TLY_FRAME_BYTES - 8, in, TLY_FRAME_BYTES - 8, key);
    why = NULL;
    int err = tly_frame_decode(in, key, seq, &f, &why);
    if (err) {
        require(err == -EPROTO && why != NULL);
        return 0;
    }
    require(f.type > 0 && f.type < TLY_FRAME_TYPES);
    require(f.payload <= TLY_MAX_CONTROL && f.length <= TLY_MAX_PART && f.rank < TLY_MAX_RANKS);
    require(tly_frame_decode(in, key, seq + 1, &f, &why) == -EPROTO);
    tly_frame_encode(&f, key, out);
    if (in[at_reserved] == 0)
        require(memcmp(in, out, sizeof in) == 0);
    return 0;
}
