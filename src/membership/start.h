/* start.h - up to the first epoch; what is split, and in which parts.  Owner: the coordinator's loop. */
#ifndef TLY_MEMBERSHIP_START_H
#define TLY_MEMBERSHIP_START_H

#include <stdbool.h>
#include <stdint.h>

struct tly_found_host;
struct tly_coordinator_member;
struct tly_coordinator;
struct tly_measure;
struct tly_member_info;
struct tly_roster;

/* start.c */
/* All are here: ranks find out who shares a machine. */
void tly_start_prove(struct tly_coordinator *c);
/* They have: measure the cards that nobody knows, or INVITE at once. */
void tly_start_survey(struct tly_coordinator *c);
/* MEASURING: does anybody still owe an answer? */
bool tly_start_awaits(const struct tly_coordinator *c);
void tly_start_go_on_measuring(struct tly_coordinator *c);
void tly_start_measured(struct tly_coordinator_member *m, const struct tly_measure *x);
/* The entry of a host's card, or NULL; make: add an empty one if there is none, NULL only without room. */
struct tly_found_host *tly_start_found(struct tly_coordinator *c, const char *host_id, bool make);
/* A member's service into a roster's place. */
void tly_start_add(struct tly_coordinator *c, struct tly_roster *r, uint32_t index,
                   const struct tly_member_info *m);
/* Name the address at which others reach it; -EINVAL: they cannot (tly_error()). */
int tly_start_place(const struct tly_coordinator *c, struct tly_roster *r, uint32_t index);
/* Log a warning if it is a tallyd that gets no share for want of memory. */
void tly_start_warn_memory(const struct tly_roster *r, uint32_t index);
bool tly_start_find_cards(const struct tly_coordinator *c, struct tly_roster *r);
/* Parts as long as suits the cards that carry most, by the roster's weights.  True: they are of another size than they
 * were; a little is none. */
bool tly_start_fit_parts(const struct tly_coordinator *c, struct tly_roster *r);
/* Is there traffic between machines? */
bool tly_start_crosses_cards(const struct tly_roster *r);

#endif
