/* loan.h - a stretch of memory that one end of a channel may read and the other leaves alone meanwhile; for media that
 * show payloads instead of sending them (struct tly_lending).  transport.h has what users of links may do with one.
 *
 * A medium puts the struct first in one of its own.  What is read is held under a lock, so that the owner can take the
 * memory back: tly_loan_move() waits for readers. */
#ifndef TLY_LOAN_H
#define TLY_LOAN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "transport/transport.h"

struct tly_loan {
    struct tly_list node;  /* the medium's */
    atomic_int references; /* whoever drops the last one frees (acq_rel) */
    pthread_mutex_t lock;  /* guards the next four */
    pthread_cond_t idle;   /* readers has become 0 */
    uint32_t readers;
    const uint8_t *data; /* NULL: taken back */
    uint8_t *copy;       /* owned: of what its owner had to have back */
    uint64_t id;         /* the sender's */
    uint32_t length;
    bool single; /* of one frame; else of a part, whose frames share it */
    /* owner: the reader's loop */
    bool open; /* more frames of the part may come */
    bool kept; /* by the link's user */
    /* The medium's, or NULL: nobody here will read it any more; and its last reference is gone. */
    void (*give_back)(struct tly_loan *loan);
    void (*finish)(struct tly_loan *loan);
};

/* One reference, the caller's.  size: of the medium's struct, all 0 behind the loan.  NULL: out of memory. */
struct tly_loan *tly_loan_create(size_t size, const uint8_t *data, uint32_t length);
void tly_loan_ref(struct tly_loan *loan);
void tly_loan_unref(struct tly_loan *loan);
/* Have it read in `copy` (length bytes, handed over), or nowhere (NULL), once those that read it now have ended. */
void tly_loan_move(struct tly_loan *loan, uint8_t *copy);
/* The reader has had all frames that go with it. */
void tly_loan_end(struct tly_loan *loan);
/* Is it a whole part that is lent, and not one frame alone? */
static inline bool tly_loan_is_whole(const struct tly_loan *loan)
{
    return !loan->single;
}

#endif
