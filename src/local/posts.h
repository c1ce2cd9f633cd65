/* posts.h - posts and the rounds in which they meet.  All under the engine's lock. */
#ifndef TLY_LOCAL_POSTS_H
#define TLY_LOCAL_POSTS_H

#include "local/engine.h"

/* --- ring.c --- */

static inline bool tly_post_is_there(struct tly_neighbour *n, uint64_t at)
{
    return atomic_load_explicit(&tly_post_at(n->control, at)->there, memory_order_acquire);
}

/* Do the rank's input and output each lie in the pool, or where no other rank reads or writes? */
static inline bool tly_post_is_pooled(const struct tly_post *p)
{
    return (~p->flags & (TLY_POST_POOL_IN | TLY_POST_POOL_OUT)) == 0;
}

/* Bytes of a ring that a payload takes behind its post. */
static inline uint64_t tly_posts_bytes_behind(uint64_t payload)
{
    return payload <= TLY_TINY ? 0 : (payload + 63) / 64 * 64;
}

/* Bytes of a ring that a post takes with its payload. */
static inline uint64_t tly_posts_length(bool grouped, uint64_t payload)
{
    return sizeof(struct tly_post) + (grouped ? TLY_POST_LINE : 0) + tly_posts_bytes_behind(payload);
}

/* Copy bytes out of a ring, from this place on. */
void tly_posts_copy(const struct tly_control *c, uint64_t at, void *to, size_t len);
/* Tell a rank how far its ring has been read, unless that is little.  What is unsaid always leaves the rank room for a
 * post, so it does not wait for the word. */
void tly_posts_say_read(struct tly_local *l, uint32_t rank);
/* Is there room for so many bytes in our ring?  If not, the others are told to read, and wake us. */
bool tly_posts_has_room(struct tly_local *l, uint64_t bytes);
/* Put a post with its payload into our ring, and tell the others. */
void tly_posts_show(struct tly_local *l, const struct tly_local_op *op, const struct tly_post *p);

/* --- posts.c --- */

/* The round of a name with this number, new if there is none.  `ranks`: those of its group, as bits; 0: all.  So posts meet
 * only where they name the same ranks.  `joins`: how often the rank that posts it had joined before, which all its ranks have in
 * common.  NULL: out of memory. */
struct tly_local_round *tly_posts_round(struct tly_local *l, uint64_t key, uint32_t number, uint64_t ranks,
                                        uint32_t joins);
/* The same; NULL: there is none. */
struct tly_local_round *tly_posts_find(const struct tly_local *l, uint64_t key, uint32_t number,
                                       uint64_t ranks);

/* The rank has joined and has not posted this, nor will it: zeros stand for it, or in a team or group nothing does. */
static inline bool tly_posts_lacks(const struct tly_local *l, const struct tly_local_round *r, uint32_t rank)
{
    return l->joined && !r->posts[rank].call && l->at[rank].joins > r->joins &&
           (!l->config.team || r->unaided);
}

/* All ranks have posted it but those that have joined. */
bool tly_posts_all_there(const struct tly_local *l, const struct tly_local_round *r);
/* Another post of the round has come, or ours is out: does it begin, or go back, or is it over? */
void tly_posts_check(struct tly_local *l, struct tly_local_round *r);
/* A rank has thought of taking back its post of a round (NULL: of one that has ended) and has said the outcome: whether it
 * is back.  Rounds that waited for this word may begin. */
void tly_posts_settle(struct tly_local *l, struct tly_local_round *r, uint32_t rank, bool back);
/* Is there no rank that thinks of taking a post back and has not said the outcome?  Asked once all posts have been seen,
 * before anything is done with them.  A rank that takes one back first says so, then looks whether all are there. */
bool tly_posts_no_doubts(const struct tly_local *l);
/* The round is worked on to its end: our operation ends well. */
void tly_posts_finish(struct tly_local *l, struct tly_local_round *r);
/* Our operation is the user's again; the round stays until all posts of it have come. */
struct tly_local_op *tly_posts_let_go(struct tly_local *l, struct tly_local_round *r);
/* Tell its user that the operation, which has been let go, has ended.  err: 0, or a positive errno with a sentence. */
void tly_posts_end(struct tly_local *l, struct tly_local_op *op, int err, const char *sentence);
/* Give it to its user to take the way through the service, which ends it or says what is wrong. */
void tly_posts_hand_back(struct tly_local *l, struct tly_local_op *op);

/* --- posts_in.c --- */

/* Read what the others have posted.  True: there was something. */
bool tly_posts_read(struct tly_local *l);
/* A rank has joined: what lacks its post alone need not wait.  False: out of memory, and the job fails. */
bool tly_posts_take_joined(struct tly_local *l, uint32_t rank);
/* Take this rank's memory back from a round that cannot be finished.  False: the job fails meanwhile. */
bool tly_posts_give_up(struct tly_local *l, const struct tly_local_round *r);
/* End the operations that ranks which have left will not do their part of. */
void tly_posts_end_lost(struct tly_local *l);

/* --- posts_out.c --- */

/* Post what was submitted, as far as our ring has room.  True: something was done. */
bool tly_posts_send(struct tly_local *l);
/* From here on wait for the other posts of what was posted at this place of our ring (way.h: at_once), as for any other. */
void tly_posts_follow(struct tly_local *l, struct tly_local_op *op, const struct tly_post *p, uint64_t at);

#endif
