/* givers.h - which ranks bring data to an operation, or to a part of it. */
#ifndef TLY_OPS_GIVERS_H
#define TLY_OPS_GIVERS_H

#include <stdbool.h>
#include <stdint.h>

enum tly_givers { TLY_ALL_GIVE, TLY_ROOT_GIVES, TLY_NONE_GIVE };

static inline bool tly_gives(enum tly_givers givers, uint32_t root, uint32_t rank)
{
    return givers == TLY_ALL_GIVE || (givers == TLY_ROOT_GIVES && rank == root);
}

#endif
